"""What a backend offers to one group of ranks: plain transfers. The collectives are composed of them above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fourfold.wire.work import Pending, Steps


class Channel(Protocol):
    """A group of `size` ranks as one of them (`index`) sees it. All tensors are flat and contiguous.

    A slot stands for one transfer; ranks reserve slots in the same order, so that equal slots meet.
    """

    size: int
    index: int
    native_all_reduce: bool
    """The backend's own all-reduce is the better one, and adds in rank order where that was asked for."""
    native_reduce_scatter: bool
    """The same of its reduce-scatter."""

    def reserve(self, signature: str) -> int:
        """The next slot. `signature` says what will cross, for backends that can compare it between ranks."""
        ...

    def all_gather(
        self, slot: int, out: Tensor, shard: Tensor, splits: Sequence[int], *, later: bool = False
    ) -> Pending:
        """Rank i's shard of splits[i] elements to part i of everyone's `out`; a shard may be a view of `out`.

        Args:
            later: a second round: ranks may start it at different moments.
        """
        ...

    def all_to_all(
        self, slot: int, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        """Part j of `inp` to rank j, part i of `out` from rank i."""
        ...

    def driven(self, steps: Steps) -> Steps:
        """The same algorithm, driven as the backend needs it: a host that polls leaves it as it is."""
        ...

    def all_reduce(self, slot: int, tensor: Tensor) -> Pending:
        """The backend's own sum, in place; only where `native_all_reduce`."""
        ...

    def reduce_scatter(self, slot: int, out: Tensor, full: Tensor) -> Pending:
        """The backend's own sum of parts; only where `native_reduce_scatter`."""
        ...

    def broadcast(self, slot: int, tensor: Tensor, source: int) -> Pending:
        """The source's tensor to all."""
        ...

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """To one rank; messages of one pair and tag arrive in order."""
        ...

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """From one rank."""
        ...

    def cancel(self) -> None:
        """Break everything off: whoever waits here is told so, and the channel is of no use any more."""
        ...


class Fabric(Protocol):
    """What connects the ranks of a world: gives channels to groups of them."""

    def channel(self, name: str, members: Sequence[int], ordered: bool) -> Channel:
        """A channel among `members` (world ranks, in order). Every member asks, in the same order.

        `ordered`: sums are taken in rank order, whatever the backend's own would do.
        """
        ...

    def leave(self) -> None:
        """Let go of everything."""
        ...
