"""ZB-H1 with twice the forwards ahead, which fill what else would be idle.

```
0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 U  .  .
1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 U  .
2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5 U
```

ZB-H2 (Qi et al. 2023, "Zero bubble pipeline parallelism", section 2). From 2 p - 1 micro-batches on, the longest idle
time within a worker's span is (p - 1)(T_F + T_I - 2 T_W), none with equal times; every worker holds 2 p - 1
micro-batches. That a worker's next step begins where its last one ends takes an update that waits for no other worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.looped import fit, forward_first
from fourfold.schedule.order import Pipelined, Shape
from fourfold.schedule.work import Work


@dataclass(frozen=True)
class Options(Pipelined):
    """Settings."""


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield each worker's pieces; its backwards of the weight lag by twice as many as there are workers before it.

    Raises:
        ScheduleError: not one stage a worker.
    """
    del options
    fit(shape, "zb_h2")
    work = Work(shape)
    for worker in range(shape.workers):
        ahead = 2 * (shape.workers - 1 - worker)
        yield from work.laid(worker, forward_first(shape, worker, ahead, lag=2 * worker))
