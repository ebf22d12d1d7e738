"""Two copies of every stage, for pipelines in opposite directions over the same workers.

```
worker       0  1  2  3
down         0  1  2  3   even micro-batches
up           3  2  1  0   odd micro-batches
```
"""

from __future__ import annotations

from fourfold.schedule.action import ScheduleError
from fourfold.schedule.order import Shape


def place(stage: int, direction: int, workers: int) -> int:
    """The worker that a stage's copy for the down (0) or the up (1) pipeline lives on."""
    return workers - 1 - stage if direction else stage


def shares(shape: Shape) -> tuple[range, range]:
    """The micro-batches of the down and of the up pipeline."""
    return range(0, shape.microbatches, 2), range(1, shape.microbatches, 2)


def fit(shape: Shape, least: int, order: str) -> None:
    """Refuse a shape that two opposite pipelines cannot share.

    Args:
        shape: to look at.
        least: the fewest micro-batches.
        order: its name.

    Raises:
        ScheduleError: says what would do.
    """
    if shape.stages != shape.workers or shape.workers % 2:
        raise ScheduleError(
            f"{order} holds two copies of each stage, on two workers: expected an even number of workers and as many "
            f"stages, found {shape.workers} and {shape.stages}; try {shape.workers + shape.workers % 2} of both"
        )
    if shape.microbatches < least or shape.microbatches % 2:
        raise ScheduleError(
            f"{order} feeds half of the micro-batches from either end of {shape.workers} workers: expected an even "
            f"number of at least {least}, found {shape.microbatches}; "
            f"try {max(least, shape.microbatches + shape.microbatches % 2)}"
        )
