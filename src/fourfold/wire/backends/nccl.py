"""Transfers over NCCL: CUDA ranks. Written for real; it was not run where this project is built (no GPU there).

NCCL runs the calls of a group in the order in which they were issued, so the rounds of one collective may not be left
to whoever polls first: they are all enqueued when it is issued, on a stream beside the caller's, and `wait` makes the
caller's stream wait for that one. The host never blocks. Sums are NCCL's own unless rank order was asked for.
NCCL knows no tags: messages of one pair arrive in the order sent, whatever their tags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.wire.work import Pending, Steps

# torch 2.13 gave these two new names; before, they were called otherwise and did the same.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclChannel:
    """A group of NCCL processes as one of them sees it.

    Args:
        ordered: compose sums of an exchange and additions in rank order.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, index: int, ordered: bool) -> None:
        self.group, self.size, self.index = group, size, index
        self.native_all_reduce = self.native_reduce_scatter = not ordered
        self._side = torch.cuda.Stream()
        self._slots = 0

    def reserve(self, signature: str) -> int:
        """Slots are numbers, counted alike on every rank."""
        self._slots += 1
        return self._slots

    def driven(self, steps: Steps) -> Steps:
        """Enqueue every round now, on the side stream, behind what the caller's stream holds."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for pending in steps:
                pending.wait()
            event = torch.cuda.Event()
            event.record(self._side)
        yield _Event(event)

    def all_gather(
        self, slot: int, out: Tensor, shard: Tensor, splits: Sequence[int], *, later: bool = False
    ) -> Pending:
        """NCCL's own if the shards are equal, else grouped messages."""
        if len(set(splits)) == 1:
            return _Enqueued([_gather(out, shard, group=self.group, async_op=True)])
        parts = out.split(list(splits))
        if parts[self.index].data_ptr() != shard.data_ptr():
            parts[self.index].copy_(shard)
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        messages = [self._message(dist.irecv, parts[rank], rank) for rank in reversed(others) if splits[rank]]
        if splits[self.index]:
            messages += [self._message(dist.isend, shard, rank) for rank in others]
        return _Enqueued(dist.batch_isend_irecv(messages) if messages else [])

    def all_to_all(
        self, slot: int, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        """The backend's own exchange."""
        work = dist.all_to_all_single(out, inp, list(out_splits), list(in_splits), group=self.group, async_op=True)
        return _Enqueued([work])

    def all_reduce(self, slot: int, tensor: Tensor) -> Pending:
        """The backend's own sum."""
        return _Enqueued([dist.all_reduce(tensor, group=self.group, async_op=True)])

    def reduce_scatter(self, slot: int, out: Tensor, full: Tensor) -> Pending:
        """The backend's own sum of parts."""
        return _Enqueued([_reduce_scatter(out, full, group=self.group, async_op=True)])

    def broadcast(self, slot: int, tensor: Tensor, source: int) -> Pending:
        """The backend's own."""
        return _Enqueued([dist.broadcast(tensor, group=self.group, group_src=source, async_op=True)])

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """One message, grouped."""
        return _Enqueued(dist.batch_isend_irecv([self._message(dist.isend, tensor, to, tag)]))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """One message, grouped."""
        return _Enqueued(dist.batch_isend_irecv([self._message(dist.irecv, tensor, source, tag)]))

    def cancel(self) -> None:
        """NCCL's own abort of the communicator."""
        self.group.abort()

    def _message(self, op: Callable[..., object], tensor: Tensor, rank: int, tag: int = 0) -> dist.P2POp:
        return dist.P2POp(op, tensor, group=self.group, tag=tag, group_peer=rank)


class _Enqueued:
    """Kernels on NCCL's stream; waiting makes the current stream wait, not the host."""

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        self._works = [work for work in works if work is not None]

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
