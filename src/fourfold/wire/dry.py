"""Dry axes and meshes: one rank of a grid of any size, which moves nothing and waits for nobody.

Everything above the channel is the real thing: the same `Axis`, the same checks, the same ops, the same formulas. So a
model that runs on a dry mesh counts, in its ledger, exactly the bytes that this rank would hand to the network, be its
tensors real, fake or on meta, where only shapes exist. That is how local shapes are compared with dense ones before
anything is allocated, and how the planner knows the traffic of one rank of thousands. While `torch.compile` traces,
nothing is counted, as on any axis: bytes count once a run.

What arrives from others is made up, of the right shape: an all-reduce leaves the tensor, an all-gather repeats this
rank's shard (zeros for the others' where shards are uneven), a reduce-scatter gives this rank's own part, exchanges
and messages bring zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from fourfold.ledger import Ledger
from fourfold.wire.axis import Axis
from fourfold.wire.errors import UsageError
from fourfold.wire.mesh import Mesh
from fourfold.wire.work import Pending, Steps
from fourfold.wire.world import World


class Dry(Axis):
    """An axis of `size` ranks of which only rank `index` exists.

    The axes of a `dry_mesh` are plain `Axis` objects; what all have in common is `axis.dry`.

    Args:
        ledger: where its bytes are counted; one of its own if None.
    """

    def __init__(self, name: str, size: int, index: int, ledger: Ledger | None = None) -> None:
        world = _world(size, index, f"dry axis {name}")
        channel = DryChannel(size, index) if size > 1 else None
        super().__init__(world, name, range(size), ledger or Ledger(rank=index), channel)


def dry_mesh(sizes: Mapping[str, int], rank: int = 0, ledger: Ledger | None = None, *, ordered: bool = False) -> Mesh:
    """The mesh as rank `rank` of a world of prod(sizes) sees it, dry. Costs nothing per rank of the world."""
    return Mesh(_world(prod(sizes.values()), rank, "dry mesh"), sizes, ledger, ordered=ordered)


def _world(size: int, rank: int, what: str) -> World:
    if not 0 <= rank < size:
        raise UsageError(f"{what}: expected one of its {size} ranks (0 … {size - 1}), found {rank}")
    return World(rank, size, "dry", torch.device("cpu"), fabric=DryFabric(rank))


class DryFabric:
    """Connects nobody."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def channel(self, name: str, members: Sequence[int], ordered: bool) -> DryChannel:
        """A channel on which this rank is alone."""
        return DryChannel(len(members), members.index(self.rank))

    def leave(self) -> None:
        """Nothing to let go of."""


class DryChannel:
    """A group of `size` ranks of which only `index` exists. Tensors may be real, fake or on meta."""

    native_all_reduce = native_reduce_scatter = True

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index

    def reserve(self, signature: str) -> int:
        """Slots meet nobody."""
        return 0

    def driven(self, steps: Steps) -> Steps:
        """All rounds at once: a dry collective is complete when it has been issued."""
        for pending in steps:
            pending.wait()
        yield from ()

    def all_gather(
        self, slot: int, out: Tensor, shard: Tensor, splits: Sequence[int], *, later: bool = False
    ) -> Pending:
        """The shard, `size` times; where shards differ, this one among zeros. It may be a view of `out`."""
        if splits.count(shard.numel()) == self.size:
            rows = out.view(self.size, -1)
            rows[self.index].copy_(shard)
            rows[: self.index].copy_(shard)
            rows[self.index + 1 :].copy_(shard)
        else:
            self._among_zeros(out, shard, splits)
        return _Done()

    def all_to_all(
        self, slot: int, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        """The part that stays, among zeros: what is summed up of it is this rank's own part."""
        start = sum(in_splits[: self.index])
        self._among_zeros(out, inp[start : start + in_splits[self.index]], out_splits)
        return _Done()

    def all_reduce(self, slot: int, tensor: Tensor) -> Pending:
        """The tensor as it is."""
        return _Done()

    def reduce_scatter(self, slot: int, out: Tensor, full: Tensor) -> Pending:
        """This rank's own part."""
        out.copy_(full[self.index * out.numel() : (self.index + 1) * out.numel()])
        return _Done()

    def broadcast(self, slot: int, tensor: Tensor, source: int) -> Pending:
        """The tensor as it is."""
        return _Done()

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """To nobody."""
        return _Done()

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Zeros."""
        tensor.zero_()
        return _Done()

    def cancel(self) -> None:
        """Nobody waits."""

    def _among_zeros(self, out: Tensor, mine: Tensor, splits: Sequence[int]) -> None:
        start = sum(splits[: self.index])
        end = start + splits[self.index]
        out[start:end].copy_(mine)
        out[:start].zero_()
        out[end:].zero_()


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None
