"""Weights that several workers of a pipeline hold (a tied embedding, both directions of a stage): one sum for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.ledger import Ledger
from fourfold.placement.pipe.part import Part
from fourfold.placement.unit import Unit
from fourfold.wire import Axis, formulas


class _Shared(NamedTuple):
    """A shared weight: its number among the model's, who holds it, and its gradient here."""

    number: int
    holders: tuple[int, ...]
    gradient: Tensor


class SharedGradients:
    """Sums the gradients of shared weights over their holders, in the order of these: all get the same bits."""

    def __init__(self, part: Part, units: Sequence[Unit], axis: Axis) -> None:
        """Among the ranks of `axis`, the pipe's."""
        self.axis = axis
        self._shared = list(_found(part, units))

    def sum(self) -> None:
        """Every holder's gradient becomes the sum. Comes when they are complete; all holders call it together."""
        own = [one.gradient.clone() for one in self._shared]
        works = []
        taken: list[dict[int, Tensor]] = []
        for one, mine in zip(self._shared, own, strict=True):
            others = [holder for holder in one.holders if holder != self.axis.index]
            works += [self.axis.send(mine, holder, "gradient", one.number) for holder in others]
            theirs = {holder: torch.empty_like(mine) for holder in others}
            works += [self.axis.receive(theirs[holder], holder, "gradient", one.number) for holder in others]
            taken.append({**theirs, self.axis.index: mine})
        for work in works:
            work.wait()
        for one, parts in zip(self._shared, taken, strict=True):
            first, *others = (parts[holder] for holder in one.holders)
            one.gradient.copy_(first)
            for other in others:
                one.gradient.add_(other)

    def forecast(self, ledger: Ledger) -> None:
        """Add the bytes of one step."""
        for one in self._shared:
            for _ in one.holders[1:]:
                ledger.send(self.axis.name, "gradient", "send", formulas.send(one.gradient.nbytes))
                ledger.send(self.axis.name, "gradient", "receive", 0)  # counted where it was handed over


def _found(part: Part, units: Sequence[Unit]) -> Iterator[_Shared]:
    slots = {slot.name: (unit, slot) for unit in units for slot in unit.arena.layout.trained_slots}
    for number, name in enumerate(part.weights):
        if name in part.shared and name in slots:
            unit, slot = slots[name]
            gradient = unit.arena.gradient[slot.shard_start : slot.shard_start + slot.segment]
            yield _Shared(number, part.shared[name], gradient)
