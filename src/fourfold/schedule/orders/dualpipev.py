"""DualPipe cut in half: the stages run down the workers and back up, so that no stage needs a second copy.

```
0 | F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3 B3.1 --   F3.2 B0.0 --   B3.2 --   F3.3 .    B0.1 --   B3.3 --   I0.2 W0.2 I0.3 W0.3 U    U
1 | .    F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 --   F2.2 B1.0 --   F1.3 B2.1 --   F2.3 B1.1 --   B2.2 --   B1.2 --   I2.3 I1.3 W2.3 W1.3 U    U
```

DualPipeV (DeepSeek-AI 2025, after the "cut in half" of Qi et al.). A worker of p, with two stages, runs what a worker
of DualPipe's 2 p would run, and holds 2 p + 1 of its half-size stages.
"""  # noqa: E501 (a drawing)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action, ScheduleError
from fourfold.schedule.order import Pipelined, Shape
from fourfold.schedule.orders.dualpipe import phases
from fourfold.schedule.work import Work, in_turn
from fourfold.schedule.zigzag import fit


@dataclass(frozen=True)
class Options(Pipelined):
    """Settings."""

    @property
    def chunks(self) -> int:
        """Two halves of a V."""
        return 2


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield the phases of each worker.

    Raises:
        ScheduleError: not two stages a worker, or fewer micro-batches than stages.
    """
    del options
    fit(shape, 2, "dualpipev")
    if shape.microbatches < shape.stages:
        raise ScheduleError(
            f"dualpipev: expected at least as many micro-batches as stages, {shape.stages}, "
            f"found {shape.microbatches}; try {shape.stages} micro-batches"
        )
    work, p = Work(shape), shape.workers
    for worker in range(p):
        passes = phases(worker, p, outer=worker, inner=2 * p - 1 - worker, microbatches=shape.microbatches)
        yield from work.laid(worker, in_turn(passes))
