"""One forward, one backward: start backward as early as possible, so that few micro-batches are in flight.

```
0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 U
1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 U
2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 U
```

PipeDream-flush (Narayanan et al. 2021, section 2.2) and DAPPLE (Fan et al. 2020, section 3.1). Worker r of p holds
min(m, p - r) micro-batches, however many there are; the makespan is GPipe's, (m + p - 1)(t_f + t_b). More forwards
ahead hold more and gain nothing while every action takes its time; where times vary, they are what a worker runs while
it waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.order import Pipelined, Shape
from fourfold.schedule.work import B, F, Piece, Work


@dataclass(frozen=True)
class Options(Pipelined):
    """Settings.

    Attributes:
        ahead: how many times as many micro-batches a worker holds, min(m, ahead (p - r)).
    """

    ahead: int = 1


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield warm-up, steady state and drain of each worker."""
    work = Work(shape)
    for stage in range(shape.stages):
        warm = min(options.ahead * (shape.stages - stage), shape.microbatches) - 1
        yield from work.laid(stage, _pieces(stage, warm, shape.microbatches))


def _pieces(stage: int, warm: int, microbatches: int) -> Iterator[Piece]:
    """`warm` forwards ahead of the first that is followed by a backward."""
    for step in range(microbatches + warm):
        if step < microbatches:
            yield F, stage, step
        if step >= warm:
            yield B, stage, step - warm
