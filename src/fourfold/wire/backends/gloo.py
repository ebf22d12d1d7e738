"""Transfers over gloo: CPU ranks on sockets.

Measured on two shared cores, one thread a rank (CPU ms over all ranks, gather issued, matrices multiplied, gather
waited for): two ranks, shards of 3.6 MB: an exchange 2.0, broadcasts 3.0, messages 4.7, gloo's own all-gather 4.9;
0.4 MB: 0.6, 0.9, 3.2, 1.1. Three and four ranks, 3.6 MB, nothing beside: broadcasts 7.1 and 14.5, messages 9.3 and
16.5, an exchange 15.0 and 27.6, gloo's own 15.1 and 32.4. So two ranks gather by an exchange and more by one broadcast
a rank; both can be polled. A gather that is a later round of something else goes by tagged messages. At two ranks
gloo's all-reduce takes 13.5 ms for 16 MiB against 19.7 for exchange, sum and gather, with the same bits; at more ranks
its bits depend on bucketing. Its reduce-scatter moves the bytes of an all-reduce and is never used.
`benchmarks/socket_bytes.py` holds what is counted against what crosses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from fourfold.wire.errors import WireError
from fourfold.wire.work import Pending, Steps

_TAGS = 1 << 30
"""Tags below are users' messages', tags from here on are slots of later rounds."""


class GlooChannel:
    """A group of gloo processes as one of them sees it."""

    native_reduce_scatter = False

    def __init__(self, group: dist.ProcessGroup, size: int, index: int) -> None:
        self.group, self.size, self.index = group, size, index
        self.native_all_reduce = size == 2  # a + b has the same bits whoever adds
        self.under_way = 0
        """Transfers that nobody has waited for to their end."""
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
        """An exchange between two ranks, a broadcast by each of more."""
        parts = out.split(list(splits))
        if later:
            return self._messages(slot, parts, shard, splits)
        mine = parts[self.index]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        if self.size == 2:
            other = 1 - self.index
            gives, takes = [0, 0], [0, 0]
            gives[other], takes[other] = splits[self.index], splits[other]
            return self.all_to_all(slot, parts[other], mine, takes, gives)
        return _Several([self.broadcast(slot, part, rank) for rank, part in enumerate(parts) if splits[rank]])

    def _messages(self, slot: int, parts: Sequence[Tensor], shard: Tensor, splits: Sequence[int]) -> Pending:
        """Tagged with the slot, so that ranks may start at different moments."""
        tag = _TAGS + slot % _TAGS
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        works = [self.group.recv([parts[rank]], rank, tag) for rank in reversed(others) if splits[rank]]
        if splits[self.index]:
            works += [self.group.send([shard], rank, tag) for rank in others]
            if parts[self.index].data_ptr() != shard.data_ptr():
                parts[self.index].copy_(shard)
        return _Messages(self, works)

    def all_to_all(
        self, slot: int, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        """The backend's own exchange."""
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


class _Collective:
    def __init__(self, channel: GlooChannel, work: dist.Work | None) -> None:
        assert work is not None
        self._channel, self._work = channel, work
        channel.under_way += 1

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        self._channel.under_way -= 1


class _Several:
    def __init__(self, pending: list[Pending]) -> None:
        self._pending = pending

    def done(self) -> bool:
        return all(one.done() for one in self._pending)

    def wait(self) -> None:
        for one in self._pending:
            one.wait()


class _Messages:
    """Point-to-point messages. Gloo says that one is complete only to who waits for it, so `done` is not known."""

    def __init__(self, channel: GlooChannel, works: list[dist.Work]) -> None:
        self._channel, self._works = channel, works
        channel.under_way += 1

    def done(self) -> bool:
        return not self._works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        self._channel.under_way -= 1
