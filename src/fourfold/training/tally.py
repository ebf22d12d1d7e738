"""What every rank tells every other about a step, and what they make of it together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.ledger import Ledger
from fourfold.placement.seats import NUMBERS
from fourfold.wire import Axis, Work, formulas


class StepError(RuntimeError):
    """A step that must not be taken: says which, on which ranks, and why."""


class Tally(NamedTuple):
    """One rank's numbers of one step.

    Attributes:
        loss, counted: sums over the rank's rows.
        digest: of the collectives that it issued and the rows of its batch; an integer of at most 52 bits.
        stop: 1.0 where the rank wishes to stop.
    """

    loss: float
    counted: float
    digest: float
    stop: float


class Courier(Protocol):
    """Takes a rank's numbers along while the step's last backward runs."""

    def give(self, numbers: Sequence[float]) -> None:
        """Send the rank's own."""
        ...

    def take(self) -> list[list[float]]:
        """Every rank's, in rank order. Comes after the rule has finished."""
        ...

    def forecast(self, ledger: Ledger) -> None:
        """Add the bytes of one step."""
        ...


class Exchange:
    """A message of its own, for where no whole gradient crosses that could take them (`placement.seats` else)."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        """Among the ranks of `axis`."""
        self.axis, self.device = axis, device
        self._sent: tuple[Work, Tensor] | None = None

    def give(self, numbers: Sequence[float]) -> None:
        """Begin a gather."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        every = mine.new_empty(self.axis.size, len(numbers))
        self._sent = self.axis.all_gather(every, mine, "control"), every

    def take(self) -> list[list[float]]:
        """Wait for it."""
        assert self._sent is not None
        (work, every), self._sent = self._sent, None
        work.wait()
        return every.tolist()

    def forecast(self, ledger: Ledger) -> None:
        """A gather of four numbers a rank."""
        if self.axis.size > 1:
            sent = formulas.all_gather(self.axis.size, self.axis.size * NUMBERS * 8)
            ledger.send(self.axis.name, "control", "all_gather", sent)


def agreed(step: int, tallies: Sequence[Tally], stages: int = 1) -> Tally:
    """The global sums, once it is certain that all ranks did the same and that the numbers are numbers.

    Args:
        step: its number.
        tallies: of all ranks, those of one pipeline stage side by side.
        stages: ranks of one of them issue the same collectives.

    Raises:
        StepError: ranks ran other collectives than the rest, a loss or count is not finite, or nothing counted.
    """
    digests = [tally.digest for tally in tallies]
    each = len(digests) // stages
    apart = [digests[first : first + each] for first in range(0, len(digests), each)]
    if any(len(set(group)) > 1 for group in apart):
        odd = [
            first * each + index
            for first, group in enumerate(apart)
            for index, digest in enumerate(group)
            if group.count(digest) <= len(group) // 2
        ]
        raise StepError(
            f"step {step}: ranks {odd or list(range(len(digests)))} ran other collectives than the rest, or were given "
            "another number of rows; expected the same on every rank. Is the batch the whole one and no rank's share? "
            "Is there rank-dependent control flow in the model or the loss?"
        )
    broken = [index for index, tally in enumerate(tallies) if not math.isfinite(tally.loss + tally.counted)]
    if broken:
        raise not_finite(step, "loss or its count", broken)
    loss, count = math.fsum(tally.loss for tally in tallies), math.fsum(tally.counted for tally in tallies)
    if count == 0:
        raise StepError(f"step {step}: no token counted on any rank; every target is ignored in this batch")
    return Tally(loss, count, digests[0], float(any(tally.stop for tally in tallies)))


def not_finite(step: int, what: str, ranks: Sequence[int]) -> StepError:
    """The words for a loss or gradient that is not finite."""
    return StepError(
        f"step {step}: the {what} is not finite on rank {', '.join(map(str, ranks))}; no weight was updated. "
        "Lower optimizer.lr, set optimizer.clip, or look at this step's batch"
    )
