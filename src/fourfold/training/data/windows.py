"""The order of the data: a pure function of (seed, step). The position in the data is one integer, the step.

An epoch visits every window once, in an order drawn by a counter-based stream; a batch may begin in one epoch and
end in the next. Nothing here depends on rank or world size: every rank can compute any row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fourfold.randomness import permutation
from fourfold.training.data.corpus import CorpusError
from fourfold.training.data.tokens import Ids


@dataclass(frozen=True)
class Batch:
    """The logical rows of one step. Calling it with a range of rows gives them as `{"tokens": [rows, T + 1]}` int64."""

    tokens: Ids
    sequence: int
    windows: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return len(self.windows)

    def __call__(self, rows: range) -> dict[str, torch.Tensor]:
        """Rows `rows` of this batch. The last token of a row is the target of the one before it."""
        chosen = [self.windows[row] for row in rows]
        out = np.empty((len(chosen), self.sequence + 1), dtype=np.int64)
        for row, window in enumerate(chosen):
            start = window * self.sequence
            out[row] = self.tokens[start : start + self.sequence + 1]
        return {"tokens": torch.from_numpy(out)}


class Source:
    """Windows of `sequence` tokens (and one more, the last target) over a training and a held-out array of ids.

    Attributes:
        train_windows, held_windows: how many windows there are of each.
        notes: what a person should know, such as tokens at the end that fill no window.
    """

    def __init__(self, train: Ids, held: Ids, *, sequence: int, rows: int, seed: int) -> None:
        """Check that there is something to train on.

        Args:
            train, held: token ids; `held` may be empty.
            sequence: tokens a row.
            rows: rows of the global batch.
            seed: of the order.

        Raises:
            CorpusError: fewer tokens than one window.
        """
        self.train, self.held = train, held
        self.sequence, self.rows, self.seed = sequence, rows, seed
        self.train_windows = _windows("the training part", train, sequence)
        self.held_windows = _windows("the held-out part", held, sequence) if len(held) else 0
        left = len(train) - 1 - self.train_windows * sequence
        words = "token" if left == 1 else "tokens"
        self.notes = (
            [f"the last {left:,} {words} of the training text fill no window and are never seen"] if left else []
        )

    def batch(self, step: int) -> Batch:
        """The rows of optimizer step `step` (from 0)."""
        first = step * self.rows
        windows = []
        for position in range(first, first + self.rows):
            epoch, index = divmod(position, self.train_windows)
            windows.append(int(_order(self.seed, epoch, self.train_windows)[index]))
        return Batch(self.train, self.sequence, tuple(windows))

    def evaluation(self, batches: int) -> list[Batch]:
        """At most `batches` batches of held-out windows, spread evenly; always the same. The last may be short."""
        count = min(self.held_windows, batches * self.rows)
        windows = [index * self.held_windows // count for index in range(count)]
        starts = range(0, count, self.rows)
        return [Batch(self.held, self.sequence, tuple(windows[start : start + self.rows])) for start in starts]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, windows: int) -> np.ndarray:
    return permutation(seed, f"data/epoch/{epoch}", windows)


def _windows(what: str, tokens: Ids, sequence: int) -> int:
    windows = (len(tokens) - 1) // sequence
    if windows < 1:
        raise CorpusError(
            f"data: {what} has {len(tokens):,} tokens, fewer than the {sequence + 1:,} of one window "
            f"(data.sequence + 1); give more text, shorten data.sequence, or change data.held_out"
        )
    return windows
