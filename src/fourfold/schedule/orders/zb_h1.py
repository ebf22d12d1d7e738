"""1F1B whose backward of the weight waits until a worker would idle: a third of the bubble, and no more memory.

```
0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4 U
1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4 U
2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4 U
```

ZB-H1 (Qi et al. 2023, "Zero bubble pipeline parallelism", section 2). From p micro-batches on, if no part is shorter
than T_W, the longest idle time within a worker's span is (p - 1)(T_F + T_I - T_W); every worker holds p micro-batches,
each until the backward of its weight.
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
    """Yield each worker's pieces; its backwards of the weight lag by as many as there are workers before it.

    Raises:
        ScheduleError: not one stage a worker.
    """
    del options
    fit(shape, "zb_h1")
    work = Work(shape)
    for worker in range(shape.workers):
        ahead = shape.workers - 1 - worker
        yield from work.laid(worker, forward_first(shape, worker, ahead, lag=worker))
