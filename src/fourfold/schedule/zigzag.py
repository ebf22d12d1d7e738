"""Stages laid over the workers in a zigzag, so that the turn from one lap to the next stays on its worker.

```
worker       0  1  2  3
stage        0  1  2  3
             7  6  5  4
             8  9 10 11
```
"""

from __future__ import annotations

from fourfold.schedule.action import ScheduleError
from fourfold.schedule.order import Shape


def place(stage: int, workers: int) -> int:
    """The worker that a stage lives on."""
    lap, position = divmod(stage, workers)
    return workers - 1 - position if lap % 2 else position


def fit(shape: Shape, laps: int, order: str) -> None:
    """Refuse a shape that does not have `laps` stages on every worker.

    Raises:
        ScheduleError: says how many stages would do.
    """
    if shape.stages != laps * shape.workers:
        raise ScheduleError(
            f"{order} on {shape.workers} workers: expected {laps} stages on each, {laps * shape.workers} in all, "
            f"found {shape.stages}; try {laps * shape.workers} stages"
        )
