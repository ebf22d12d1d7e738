"""Stages dealt to the workers round after round, and micro-batches taken as many at a time as there are workers.

```
worker       0  1  2  3
chunk 0      0  1  2  3
chunk 1      4  5  6  7
```

A worker sends the first p micro-batches through its first chunk, then through the next, and so on; then the next p
micro-batches. Backwards go the same way from the last chunk. With one chunk that is micro-batch after micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import ScheduleError
from fourfold.schedule.order import Pipelined, Shape
from fourfold.schedule.work import B, F, I, Piece, W


@dataclass(frozen=True)
class Looped(Pipelined):
    """Settings.

    Attributes:
        chunks: stages a worker; more of them, a smaller bubble and more transfers.
    """

    chunks: int = 2


def fit(shape: Shape, order: str) -> None:
    """Refuse a shape that does not have `shape.chunks` stages on every worker.

    Raises:
        ScheduleError: says how many stages would do.
    """
    expected = shape.chunks * shape.workers
    if shape.stages != expected:
        raise ScheduleError(
            f"{order} on {shape.workers} workers: expected {shape.chunks} stages on each, {expected} in all, "
            f"found {shape.stages}; try {expected} stages"
        )


def fit_rounds(shape: Shape, order: str) -> None:
    """Refuse micro-batches that do not come in whole rounds, if a worker has several chunks to go through in each.

    Raises:
        ScheduleError: names the nearest number that would do.
    """
    workers, found = shape.workers, shape.microbatches
    if shape.chunks > 1 and found % workers:
        nearest = max(workers, (found + workers // 2) // workers * workers)
        raise ScheduleError(
            f"{order} sends {workers} micro-batches at a time, one a worker, through each of {shape.chunks} chunks: "
            f"expected a multiple of {workers}, found {found}; try {nearest} micro-batches"
        )


def forward_first(
    shape: Shape, worker: int, ahead: int, lag: int | None = None, group: int | None = None
) -> Iterator[Piece]:
    """A worker's pieces: forwards alone, then a forward and a backward in turn, then backwards alone.

    Args:
        shape: of a fitting number of stages and micro-batches.
        worker: whose.
        ahead: how many forwards precede the first that is followed by a backward.
        lag: None for whole backwards; else those of the weight come apart, each so many after that of its input.
        group: how many micro-batches go through a chunk at a time; None: one a worker.
    """
    size = shape.workers if group is None else group
    forwards, backwards = _line(shape, worker, False, size), _line(shape, worker, True, size)
    count = len(forwards)
    ahead = min(ahead, count)
    for step in range(count + ahead):
        if step < count:
            yield F, *forwards[step]
        back = step - ahead
        if back >= 0:
            yield B if lag is None else I, *backwards[back]
        if lag is not None and back >= lag:
            yield W, *backwards[back - lag]
    if lag is not None:
        yield from ((W, *place) for place in backwards[max(count - lag, 0) :])


def _line(shape: Shape, worker: int, backward: bool, group: int) -> list[tuple[int, int]]:
    """Stage and micro-batch of a worker's forwards or backwards."""
    stages = range(worker, shape.stages, shape.workers)
    return [
        (stage, microbatch)
        for first in range(0, shape.microbatches, group)
        for stage in (reversed(stages) if backward else stages)
        for microbatch in range(first, min(first + group, shape.microbatches))
    ]
