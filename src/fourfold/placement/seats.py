"""A few numbers of every rank that travel behind a gradient, instead of in a message of their own.

Each rank writes into its own seats and zeros into the others', so that the gradient's sum over the ranks gathers them.
On two gloo ranks a message of 32 bytes takes a quarter of a millisecond of CPU beside a backward: threads wake each
other six times for it. A step of a small model is 14 ms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.ledger import Ledger

NUMBERS = 4
"""Numbers that a rank tells the others in a step: loss, count, digest, stop (see `training.tally`)."""

_PARTS = 3
"""A number of 53 bits crosses as three of at most 24, which fp32 holds exactly; what is not finite arrives as NaN."""


def room(ranks: int) -> int:
    """Elements that the numbers of so many ranks take."""
    return ranks * NUMBERS * _PARTS


class Seats:
    """The elements behind a gradient that is summed over all ranks."""

    def __init__(self, elements: Tensor, index: int) -> None:
        """`elements`: flat [`room(ranks)`]; `index`: which rank this is."""
        self._elements = elements
        self._ranks = elements.view(-1, NUMBERS, _PARTS)
        self._own = self._ranks[index].view(-1)

    def give(self, numbers: Sequence[float]) -> None:
        """Take the seats; the gradient has not left yet."""
        self._elements.zero_()
        self._own.copy_(torch.tensor([part for number in numbers for part in parts(number)], dtype=torch.float64))

    def take(self) -> list[list[float]]:
        """Every rank's numbers, in rank order; the gradient has been summed."""
        return [[math.fsum(three) for three in rank] for rank in self._ranks.tolist()]

    def forecast(self, ledger: Ledger) -> None:
        """Nothing: the rule counts the whole message."""


def parts(number: float) -> tuple[float, float, float]:
    """Three numbers of at most 24 significant bits that add up to `number`."""
    high = _short(number)
    middle = _short(number - high)
    return high, middle, _short(number - high - middle)


def _short(number: float) -> float:
    """The nearest number of 24 significant bits."""
    if not math.isfinite(number):
        return math.nan
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * (1 << 24)), exponent - 24)
