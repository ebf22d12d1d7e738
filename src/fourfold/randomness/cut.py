"""Masks of a part of a tensor: what one process would draw for the whole, and of it only what a rank holds.

A tensor grid cuts other dims than that of the rows: features over x, heads over y, the sequence in its own form. The
mask of a part must be that part of the whole mask, so its elements keep the numbers that they have in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import torch
from torch import Tensor

from fourfold.randomness.philox import RandomnessError

Lanes = Callable[[int, int], np.ndarray]
"""(start, count) → lanes [start, start + count) of a stream."""

SEEK = 16_000
"""Lanes that take as long as reaching another place of the stream.

Measured on one core: a call takes 10.6 µs and 5 µs around it, a lane 0.92 ns; both ways take 8.3 ms for half of 32,768
features of 128 tokens. So a half of 768 features is sliced out of whole rows (3.0 ms where runs alone take 36 ms), and
a half of 12 heads with 128 × 128 weights each is drawn alone.
"""

CHUNK = 1 << 18
"""Lanes of whole rows that are drawn at a time, in order to keep some of them: half a MiB."""


@dataclass(frozen=True)
class Cut:
    """What a rank holds along one dim of the tensor that a site drops from.

    Attributes:
        dim: of the local tensor; where it is the dim that holds the rows (batch × heads), the cut is of one row's share
            of it.
        runs: the logical indices that lie there, in this order: several runs where projections are packed, of any
            lengths, other ones on every rank.
        size: entries of the whole dim (of a row's share of it).
    """

    dim: int
    runs: tuple[range, ...]
    size: int

    def __post_init__(self) -> None:
        fits = all(run.step == 1 and 0 <= run.start <= run.stop <= self.size for run in self.runs)
        if self.dim < 0 or not fits:
            raise RandomnessError(
                f"cut of a dropout: expected a dim from 0 and runs of step 1 within 0 … {self.size}, found dim "
                f"{self.dim} and {self.runs}; say which logical indices this rank holds"
            )

    @property
    def held(self) -> int:
        """Entries that this rank holds."""
        return sum(map(len, self.runs))


Runs = tuple[range, ...]


@dataclass(frozen=True)
class Part:
    """What a rank holds of every row of a tensor.

    Attributes:
        shape: of a row here.
        whole: of the same row in one process.
        runs: of every dim, the logical indices that are here.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    runs: tuple[Runs, ...]

    @classmethod
    def of(cls, shape: Sequence[int], cuts: Sequence[Cut]) -> Part | None:
        """A row of this local shape under the cuts; None if the shape is not what they say."""
        whole, runs = list(shape), list[Runs]((range(size),) for size in shape)
        for cut in cuts:
            if shape[cut.dim] != cut.held:
                return None
            whole[cut.dim], runs[cut.dim] = cut.size, cut.runs
        return cls(tuple(shape), tuple(whole), tuple(runs))

    def keep(self, lanes: Lanes, row: int, rows: int, dropped: int) -> np.ndarray:
        """The mask [rows, *shape] of the rows from `row` on: True where a lane is at least `dropped`."""
        out = np.empty((rows, *self.shape), dtype=bool)
        if out.size:
            _draw(out, lanes, row * prod(self.whole), self.whole, self.runs, dropped)
        return out

    def take(self, row: Tensor) -> Tensor:
        """What is here of a tensor of the shape `whole`."""
        for dim, (runs, size) in enumerate(zip(self.runs, self.whole, strict=True)):
            if runs != (range(size),):
                held = (row.narrow(dim, run.start, len(run)) for run in runs)
                row = torch.cat([row.narrow(dim, 0, 0), *held], dim)  # the first for a rank that holds nothing
        return row


def _draw(out: np.ndarray, lanes: Lanes, start: int, whole: Sequence[int], runs: Sequence[Runs], dropped: int) -> None:
    """Fill out [n, *local shape] with the masks of n tensors of the shape `whole`, side by side from lane `start` on.

    Where much would be drawn in vain, the runs along the first cut dim are reached one by one, else all is drawn.
    """
    first = next((dim for dim, held in enumerate(runs) if held != (range(whole[dim]),)), len(whole))
    whole, runs, out = whole[first:], runs[first:], out.reshape(-1, *out.shape[1 + first :])
    size, inner = prod(whole), prod(whole[1:])
    if whole and (size > CHUNK or size - out.shape[1] * inner > len(runs[0]) * SEEK):
        for number, (here, there) in product(range(len(out)), _slices(runs[0])):
            at = start + number * size + there.start * inner
            _draw(out[number, here], lanes, at, whole[1:], runs[1:], dropped)
        return
    boxes = list(product(*map(_slices, runs)))
    step = max(1, CHUNK // size)
    for number in range(0, len(out), step):
        some = out[number : number + step]
        drawn = lanes(start + number * size, len(some) * size).reshape(-1, *whole)
        for box in boxes:
            here, there = tuple(here for here, _ in box), tuple(there for _, there in box)
            np.greater_equal(drawn[:, *there], dropped, out=some[:, *here])


def _slices(runs: Runs) -> Iterator[tuple[slice, slice]]:
    """Of each run that is not empty: where it lies here, and where in the whole."""
    at = 0
    for run in runs:
        if run:
            yield slice(at, at + len(run)), slice(run.start, run.stop)
        at += len(run)
