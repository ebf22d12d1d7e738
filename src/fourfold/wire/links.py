"""All links of one rank on an axis: one place to send from, and one where whatever comes first is taken."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import TracebackType

from torch import Tensor

from fourfold.wire.axis import Axis
from fourfold.wire.errors import UsageError
from fourfold.wire.link import Link, Lost, Message, Sending

SETTLE = 1.0
"""Seconds in which what is under way may come to its end when links are broken off."""


class Links:
    """Messages between this rank and any other of `axis`.

    ```python
    with Links(mesh["pipe"]) as links:
        links.expect(source=0, count=2)
        links.send(2, key=7, tensors=[hidden, None], kind="activation")
        source, key, tensors = links.receive()
    ```

    A context manager: leaving it waits until all has gone, and ends the threads. Leaving it by an exception breaks off
    what is under way, so that the other ranks hear of it too, and the axis cannot be used any more.

    Only one thread may use it. Messages of one rank come in the order sent; those of several as they arrive.
    """

    def __init__(self, axis: Axis) -> None:
        """No thread begins before there is something to wait for.

        Raises:
            UsageError: NCCL, on which a rank's sends and receives would wait for one another.
        """
        if axis.world.backend == "nccl":
            raise UsageError(
                f"axis {axis.name}: messages go over gloo or between threads; NCCL runs the two directions of a pair "
                "one after the other, so that both ends may wait for ever; launch with backend gloo"
            )
        self.axis = axis
        self._arrivals: SimpleQueue[Message | Lost] = SimpleQueue()
        self._links: dict[int, Link] = {}

    def __enter__(self) -> Links:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.break_off()

    def send(self, to: int, key: int, tensors: Sequence[Tensor | None], kind: str) -> Sending:
        """Start a message to rank `to` of the axis (`Link.send`)."""
        return self._link(to).send(key, tensors, kind)

    def expect(self, source: int, count: int) -> None:
        """`count` more messages will come from rank `source` of the axis.

        Say so at the beginning of a step: until a message is expected, it stays with its sender.
        """
        if count < 0:
            raise UsageError(f"axis {self.axis.name}: expected a number of messages, found {count}")
        self._link(source).expect(count)

    def poll(self) -> Message | None:
        """The message that came first of those not yet taken, if there is one. Never blocks.

        Raises:
            WireError: as `receive`.
        """
        try:
            return self._taken(self._arrivals.get_nowait())
        except Empty:
            return None

    def receive(self) -> Message:
        """The message that came first of those not yet taken; blocks until there is one.

        Raises:
            WireError: a message, to or from any rank, was lost: says which, and who is missing.
            UsageError: no message is expected, so that none will ever come.
        """
        found = self.poll()
        if found is None:
            with self._watched():
                found = self._taken(self._arrivals.get())
        return found

    def close(self) -> None:
        """Wait until all has gone, and end the threads. Closing again does nothing.

        Raises:
            WireError: a message could not go.
            UsageError: messages are still expected, which are now broken off.
        """
        if names := self._awaited():
            self.break_off()
            raise UsageError(
                f"axis {self.axis.name}: closed while a message from {names} is expected; receive it first"
            )
        for link in self._links.values():
            link.close()
        while not self._arrivals.empty():
            self._taken(self._arrivals.get())

    def break_off(self) -> None:
        """End the threads, whatever they wait for; what can still come or go by itself may do so first.

        Gloo tells nobody of a transfer that is cut off in the middle: a thread that waits for one is left behind.
        """
        for cancels in (False, True):
            if cancels and any(link.busy for link in self._links.values()):
                self.axis.channel.cancel()
            ends = time.monotonic() + SETTLE
            for link in self._links.values():
                link.close(within=max(0.0, ends - time.monotonic()))

    def _link(self, peer: int) -> Link:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link(self.axis, peer, self._arrivals)
        return link

    def _taken(self, found: Message | Lost) -> Message:
        if isinstance(found, Lost):
            raise self.axis.failure(found.what, found.error) from found.error
        self._links[found.source].awaited -= 1
        return found

    def _awaited(self) -> str:
        return ", ".join(link.name for link in self._links.values() if link.awaited)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Whoever reads the watch sees that this rank waits, and for whom."""
        names = self._awaited()
        if not names:
            raise UsageError(f"axis {self.axis.name}: waiting for a message that nobody announced; `expect` it first")
        watch, step = self.axis.world.watch, self.axis.ledger.step
        what = f"message from {names}"
        if watch is not None:
            watch.enter(step, self.axis.name, what, 0)
        yield
        if watch is not None:
            watch.leave(step, self.axis.name, what, 0)
