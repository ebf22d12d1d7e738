"""Interleaved 1F1B whose backward of the weight waits until a worker would idle.

```
0 | F0.0 F0.1 F0.2 F3.0 F3.1 F3.2 .    .    I3.0 W3.0 I3.1 W3.1 I3.2 W3.2 I0.0 W0.0 I0.1 W0.1 I0.2 W0.2 U    U
1 | .    F1.0 F1.1 F1.2 F4.0 F4.1 .    I4.0 F4.2 I4.1 W4.0 I4.2 W4.1 I1.0 W4.2 I1.1 W1.0 I1.2 W1.1 W1.2 U    U
2 | .    .    F2.0 F2.1 F2.2 F5.0 I5.0 F5.1 I5.1 F5.2 I5.2 W5.0 I2.0 W5.1 I2.1 W5.2 I2.2 W2.0 W2.1 W2.2 U    U
```

ZB-1P as torch.distributed.pipelining interleaves it, after Qi et al. 2023. Times of a worker's whole share: if no part
is shorter than T_W, the longest idle time within a worker's span is (p - 1)(T_F + T_I - T_W) / v; every worker holds
p v passes of its v chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.looped import Looped, fit, fit_rounds, forward_first
from fourfold.schedule.order import Shape
from fourfold.schedule.work import Work


@dataclass(frozen=True)
class Options(Looped):
    """Settings."""


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield each worker's pieces; its backwards of the weight lag by as many as there are workers before it.

    Raises:
        ScheduleError: not `shape.chunks` stages a worker, or micro-batches that are no multiple of the workers.
    """
    del options
    fit(shape, "zb_1p")
    fit_rounds(shape, "zb_1p")
    work, workers = Work(shape), shape.workers
    for worker in range(workers):
        ahead = (shape.chunks - 1) * workers + workers - 1 - worker
        yield from work.laid(worker, forward_first(shape, worker, ahead, lag=worker))
