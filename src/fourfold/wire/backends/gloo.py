"""Transfers over gloo: CPU ranks on sockets.

Two ranks gather and exchange by gloo's own exchange, more by messages. Measured, CPU ms over all ranks, one thread
each, on two shared cores: two ranks, shards of 3.6 MB, matrices multiplied beside: a gather by an exchange 2.0, by
broadcasts 3.0, by messages 4.7, gloo's own 4.9. Three, four and eight ranks, nothing beside: broadcasts 6.1, 11.5 and
53.8, messages 5.7, 10.7 and 52.2. What decides are the links: on eight of 200 Mbit/s (`benchmarks/slow_grid.py`), where
4 MiB should take 147 ms, a gather by broadcasts takes 482 ms (each goes down a tree, two at a time, so that most links
idle) and by messages 165; gloo's own exchange takes 233 ms (while a rank's large message to another is under way, the
word that it is ready for the other's waits behind it: pairs talk in one direction after the other) and messages whose
receives are all posted before the first send take 167.

A gather that is a later round of something else goes by messages between two ranks as well. At two ranks gloo's
all-reduce takes 13.5 ms for 16 MiB against 19.7 for exchange, sum and gather, with the same bits; at more its bits
depend on bucketing. Its reduce-scatter moves the bytes of an all-reduce and is never used.
`benchmarks/socket_bytes.py` holds what is counted against what crosses.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.wire.errors import WireError
from fourfold.wire.work import Pending, Steps

_TAGS = 1 << 30
"""Tags below are users' messages', tags from here on are slots."""
CLOSING = 1000
"""How often, a millisecond each, a connection that is to be closed may be busy."""


class GlooChannel:
    """A group of gloo processes as one of them sees it."""

    native_reduce_scatter = False

    def __init__(self, group: dist.ProcessGroup, size: int, index: int) -> None:
        self.group, self.size, self.index = group, size, index
        self.native_all_reduce = size == 2  # a + b has the same bits whoever adds
        self.under_way: set[object] = set()
        """Transfers that nobody has waited for to their end. (A set: threads add and take away without a lock.)"""
        self._slots = 0

    def close(self) -> None:
        """Let go of the group, which ends its threads; with transfers under way they would be waited for: then not.

        A thread that lets go of a tensor while Python itself is ending takes the process down ("terminate called
        without an active exception").
        """
        if not self.under_way:
            del self.group

    def reserve(self, signature: str) -> int:
        """Slots are numbers, counted alike on every rank."""
        self._slots += 1
        return self._slots

    def all_gather(
        self, slot: int, out: Tensor, shard: Tensor, splits: Sequence[int], *, later: bool = False
    ) -> Pending:
        """An exchange between two ranks, messages among more."""
        parts = out.split(list(splits))
        if later or self.size > 2:
            return self._messages(slot, parts, [shard] * self.size)
        mine, other = parts[self.index], 1 - self.index
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        gives, takes = [0, 0], [0, 0]
        gives[other], takes[other] = splits[self.index], splits[other]
        return self.all_to_all(slot, parts[other], mine, takes, gives)

    def _messages(self, slot: int, takes: Sequence[Tensor], gives: Sequence[Tensor]) -> Pending:
        """`gives[j]` to rank j, `takes[i]` from rank i; tagged with the slot, so that ranks may start at any moment.

        Receives are posted before sends, or else the word that a rank may send would wait behind what goes to it.
        """
        tag = _TAGS + slot % _TAGS
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        works = [self.group.recv([takes[rank]], rank, tag) for rank in reversed(others) if takes[rank].numel()]
        works += [self.group.send([gives[rank]], rank, tag) for rank in others if gives[rank].numel()]
        mine, kept = takes[self.index], gives[self.index]
        if mine.data_ptr() != kept.data_ptr():
            mine.copy_(kept)
        return _Messages(self, works)

    def all_to_all(
        self, slot: int, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        """The backend's own exchange between two ranks, messages among more."""
        if self.size > 2:
            return self._messages(slot, out.split(list(out_splits)), inp.split(list(in_splits)))
        work = dist.all_to_all_single(out, inp, list(out_splits), list(in_splits), group=self.group, async_op=True)
        return _Collective(self, work)

    def driven(self, steps: Steps) -> Steps:
        """As it is: the caller polls."""
        return steps

    def all_reduce(self, slot: int, tensor: Tensor) -> Pending:
        """The backend's own sum."""
        return _Collective(self, dist.all_reduce(tensor, group=self.group, async_op=True))

    def reduce_scatter(self, slot: int, out: Tensor, full: Tensor) -> Pending:
        """Never called."""
        raise WireError(f"slot {slot}: gloo's reduce-scatter moves twice the bytes; wire composes a better one")

    def broadcast(self, slot: int, tensor: Tensor, source: int) -> Pending:
        """The backend's own."""
        return _Collective(self, dist.broadcast(tensor, group=self.group, group_src=source, async_op=True))

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """One message."""
        return _Messages(self, [self.group.send([tensor], to, tag)])

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """One message."""
        return _Messages(self, [self.group.recv([tensor], source, tag)])

    def cancel(self) -> None:
        """Close the group's connections; its other ranks see that as the loss of this one.

        Gloo has no other way to wake a thread that waits for a message (its `abort` does nothing): a receive that
        reaches its time-out closes the connections of its group. One is posted again and again, until it is refused
        because the connection is closed. A thread that waits for a transfer which has begun is not woken, neither here
        nor at its other end (gloo tells only of those that have not).
        """
        for other in range(self.size):
            for _ in range(CLOSING if other != self.index else 0):
                try:
                    work = self.group.recv([torch.empty(1)], other, _TAGS - 1)
                except RuntimeError:
                    break
                with suppress(RuntimeError):
                    work.wait(timedelta(milliseconds=1))


class _Collective:
    def __init__(self, channel: GlooChannel, work: dist.Work | None) -> None:
        assert work is not None
        self._channel, self._work = channel, work
        channel.under_way.add(self)

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        self._channel.under_way.discard(self)


class _Messages:
    """Point-to-point messages. Gloo says that one is complete only to who waits for it, so `done` is not known."""

    def __init__(self, channel: GlooChannel, works: list[dist.Work]) -> None:
        self._channel, self._works = channel, works
        channel.under_way.add(self)

    def done(self) -> bool:
        return not self._works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        self._channel.under_way.discard(self)
