"""Whole logical tensors from the blocks that the ranks of x and y hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fourfold.placement.cut import Block, Cut
from fourfold.wire import Mesh


@dataclass(frozen=True)
class Assembly:
    """Who holds what of the weights.

    Attributes:
        mesh: this rank's.
        cuts: of every weight.
    """

    mesh: Mesh
    cuts: Mapping[str, Cut]

    def block(self, name: str) -> Block:
        """What this rank holds of a weight."""
        return self.cuts[name].at({axis: self.mesh.coordinates[axis] for axis in self.axes(name)})

    def axes(self, name: str) -> tuple[str, ...]:
        """The axes that a weight is cut over by features, or copied over."""
        return ("x", "y", "z") if name in self.still else ("x", "y")

    @cached_property
    def still(self) -> frozenset[str]:
        """Weights that are cut over z by features: what z cuts of the others by rows, they rest without."""
        cuts = self.cuts.items()
        return frozenset(name for name, cut in cuts if any(share and share.axis == "z" for share in cut.shares))

    def blocks(self) -> dict[str, Block]:
        """What this rank holds of every weight."""
        return {name: self.block(name) for name in self.cuts}

    def assembled(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of this rank's blocks, by name, on every rank. All ranks of a replica call it together."""
        whole: dict[str, Tensor] = {}
        for name, mine in local.items():
            axis = self.mesh.over(*self.axes(name))
            blocks = [self.cuts[name].at(self._coordinates(index, self.axes(name))) for index in range(axis.size)]
            largest = max(torch.Size(block.shape).numel() for block in blocks)
            padded = mine.new_zeros(largest)
            padded[: mine.numel()] = mine.reshape(-1)
            every = mine.new_empty(axis.size, largest)
            axis.all_gather(every.view(-1), padded, "control").wait()
            whole[name] = mine.new_empty(self.cuts[name].shape)
            for block, values in zip(blocks, every, strict=True):
                block.put(whole[name], values[: torch.Size(block.shape).numel()])
        return whole

    def _coordinates(self, index: int, axes: tuple[str, ...]) -> dict[str, int]:
        found: dict[str, int] = {}
        for axis in axes:
            index, found[axis] = divmod(index, self.mesh[axis].size)
        return found
