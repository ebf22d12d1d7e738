"""Stages laid over the workers in waves, forward and back, so that a pipeline is filled from both ends by one copy.

```
0 | F0.0 F0.1 F0.2 .    .    F5.0 B5.0 F5.1 B5.1 F5.2 B5.2 B0.0 .    B0.1 .    B0.2 U    U
1 | .    F1.0 F1.1 F1.2 F4.0 .    F4.1 B4.0 F4.2 B4.1 B1.0 B4.2 B1.1 .    B1.2 U    U    .
2 | .    .    F2.0 F3.0 F2.1 F3.1 F2.2 F3.2 B3.0 B2.0 B3.1 B2.1 B3.2 B2.2 U    U    .    .
```

Hanayo (Liu et al. 2023, section 3). W waves are 2 W stages a worker, in a zigzag whose turns need no transfer. Laid out
greedily, backward first, with p micro-batches in flight, which is the most that a worker holds. Where p | m, the
makespan exceeds the work by (p - 1)(t_f + t_b) / (2 W) with equal times; with longer backwards and one wave it does by
(p - 1)(t_b + (m / p - 1)(t_b - t_f)).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.greedy import greedy
from fourfold.schedule.order import Pipelined, Shape
from fourfold.schedule.work import B, F, Work
from fourfold.schedule.zigzag import fit, place


@dataclass(frozen=True)
class Options(Pipelined):
    """Settings.

    Attributes:
        waves: how often the stages run down and up the workers; more waves, a smaller bubble and more transfers.
    """

    waves: int = 1

    @property
    def chunks(self) -> int:
        """Down and up, for every wave."""
        return 2 * self.waves


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield each worker's pieces, laid out greedily: backward first, then the later stage.

    Raises:
        ScheduleError: not `2 * waves` stages a worker.
    """
    fit(shape, 2 * options.waves, "hanayo")
    p, every = shape.workers, range(shape.microbatches)
    workers = {(kind, stage, k): place(stage, p) for k in every for stage in range(shape.stages) for kind in (F, B)}
    holds = {(F, 0, k): [(B, 0, k - p)] for k in every[p:]}
    work = Work(shape)
    for worker, line in enumerate(greedy(workers, lambda piece: (piece[0] != B, -piece[1], piece[2]), holds)):
        yield from work.laid(worker, line)
