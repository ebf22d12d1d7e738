"""The panels of SUMMA: pieces of the features that a product sums over, each owned by one rank of every line."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from fourfold.wire.formulas import shares


class Panel(NamedTuple):
    """Some of the features that are summed over, and where they are.

    Attributes:
        left: who owns them of x: a rank of `features`.
        right: who owns them of the weight: a rank of `rows`.
        inputs: where they lie in the owner's x.
        weights: where they lie in the owner's weight.
    """

    left: int
    right: int
    inputs: slice
    weights: slice

    @property
    def width(self) -> int:
        """How many."""
        return self.inputs.stop - self.inputs.start


def panels(total: int, rows: int, features: int) -> list[Panel]:
    """The panels of a layer with so many input features: one for each rank of a line, more where axes differ."""
    lefts, rights = ([0, *accumulate(shares(total, ranks))] for ranks in (features, rows))
    ends = sorted({*lefts, *rights})
    found = []
    for first, last in zip(ends, ends[1:], strict=False):
        left = next(rank for rank in range(features) if lefts[rank] <= first < lefts[rank + 1])
        right = next(rank for rank in range(rows) if rights[rank] <= first < rights[rank + 1])
        inputs = slice(first - lefts[left], last - lefts[left])
        found.append(Panel(left, right, inputs, slice(first - rights[right], last - rights[right])))
    return found
