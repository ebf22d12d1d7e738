"""A link carries messages between this rank and one other of an axis, both ways, without ever blocking the caller.

Gloo says that a message has come, or gone, only to a thread that waits for it. So a link has two: one takes what comes
(the header, then the elements, into memory that it finds for them) and hands it over through a queue; one waits for
what has gone, and lets go of it. Transfers are started by the caller (sends) and by the taking thread (receives) only,
so that every tag's transfers begin in their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.wire import arguments, message
from fourfold.wire.axis import Axis
from fourfold.wire.clerk import Clerk
from fourfold.wire.work import Pending

HEADER, BODY = (1 << 30) - 2, (1 << 30) - 3
"""Tags of headers and of all that follows them: two, so that a header's receive can be posted before a body's."""


class Message(NamedTuple):
    """A message that has come.

    Attributes:
        source: the rank of the axis that sent it.
        key: what that rank calls it.
        tensors: as they were sent; those of one dtype share memory.
    """

    source: int
    key: int
    tensors: tuple[Tensor | None, ...]


class Lost(NamedTuple):
    """A message that could not come or go.

    Attributes:
        what: which one, and from or to which rank of the world.
    """

    what: str
    error: Exception


class Sending:
    """A message on its way out.

    Args:
        fail: makes the error to raise of a backend's.
    """

    __slots__ = ("_error", "_fail", "_gone", "_pending")

    def __init__(self, pending: Sequence[Pending], fail: Callable[[Exception], Exception]) -> None:
        self._error: Exception | None = None
        self._pending, self._fail = pending, fail
        self._gone = threading.Event()
        if all(part.done() for part in pending):
            self.finish()

    @property
    def done(self) -> bool:
        """Its tensors are the caller's again."""
        return self._gone.is_set()

    def wait(self) -> None:
        """Block until it has gone.

        Raises:
            WireError: it could not go. (Who receives from the `Links` is told as well.)
        """
        self._gone.wait()
        if self._error is not None:
            raise self._fail(self._error) from self._error

    def finish(self) -> None:
        """Wait for the transfers and let go of the tensors. For whoever may block."""
        try:
            for part in reversed(self._pending):  # they go in order: mostly one wait, not one a part
                part.wait()
        except Exception as error:
            self._error = error
            raise
        finally:
            self._pending = ()
            self._gone.set()


class Link:
    """Messages to and from rank `peer` of `axis`.

    Args:
        arrivals: what has come, and what was lost, is put here.
    """

    def __init__(self, axis: Axis, peer: int, arrivals: SimpleQueue[Message | Lost]) -> None:
        arguments.peer(axis, "messages", "peer", peer, 0)
        self.axis, self.peer, self.name = axis, peer, f"rank {axis.members[peer]}"
        self.awaited = 0
        """Messages that were announced and not yet handed on."""
        self._arrivals = arrivals
        self._channel = axis.channel
        where = f"messages on axis {axis.name}"
        self._leaving, self._coming = Clerk(f"{where} to {self.name}"), Clerk(f"{where} from {self.name}")

    @property
    def busy(self) -> bool:
        """Something is still to come or to go."""
        return self._leaving.busy or self._coming.busy

    def send(self, key: int, tensors: Sequence[Tensor | None], kind: str) -> Sending:
        """Start a message; returns at once. The tensors may be read, but not written, until it is done.

        Its bytes (`formulas.message`) are counted here, once.
        """
        parts = message.pack(key, tensors)
        number = self.axis.count("send", kind, sum(part.nbytes for part in parts))
        tags = [HEADER, *[BODY] * (len(parts) - 1)]
        what = f"message {key} to {self.name} (send {number})"
        try:
            pending = [self._channel.send(part, self.peer, tag) for part, tag in zip(parts, tags, strict=True)]
        except Exception as error:
            raise self.axis.failure(what, error) from error
        sending = Sending(pending, partial(self.axis.failure, what))
        if not sending.done:
            self._leaving.give(partial(self._see_off, sending, what))
        return sending

    def expect(self, count: int) -> None:
        """So many messages will come: take them as they do. Until then, nothing is received."""
        if count:
            self.awaited += count
            self._coming.give(partial(self._take, count))

    def close(self, within: float | None = None) -> None:
        """Return when all has come and gone and both threads have ended, or (each) after so many seconds."""
        self._leaving.close(within)
        self._coming.close(within)

    # ---- in the threads

    def _see_off(self, sending: Sending, what: str) -> None:
        try:
            sending.finish()
        except Exception as error:
            self._arrivals.put(Lost(what, error))

    def _take(self, count: int) -> None:
        try:
            header = self._post_header()
            for left in reversed(range(count)):
                body = self._body(*header)
                if left:
                    header = self._post_header()  # before anybody waits for the body: the next one need not wait
                self._arrivals.put(body.arrived(self.peer))
                del body  # the next one may be long in coming
        except Exception as error:
            self._arrivals.put(Lost(f"a message from {self.name}", error))

    def _post_header(self) -> tuple[Tensor, Pending]:
        words = torch.empty(message.MESSAGE_WORDS, dtype=torch.int64)
        return words, self._channel.receive(words, self.peer, HEADER)

    def _body(self, words: Tensor, pending: Pending) -> _Body:
        """Wait for the header, then post the receives of what it announces."""
        pending.wait()
        header, rest = message.read(words), torch.empty(0, dtype=torch.int64)
        if header.missing:
            rest = torch.empty(header.missing, dtype=torch.int64)
            self._channel.receive(rest, self.peer, BODY).wait()
        forms = message.forms(header, rest.tolist())
        filled = message.buffers(forms)
        return _Body(header.key, forms, filled, [self._channel.receive(o, self.peer, BODY) for o in filled.values()])


class _Body(NamedTuple):
    key: int
    forms: list[message.Form | None]
    filled: dict[torch.dtype, Tensor]
    pending: list[Pending]

    def arrived(self, source: int) -> Message:
        for part in self.pending:
            part.wait()
        return Message(source, self.key, message.unpack(self.forms, self.filled))
