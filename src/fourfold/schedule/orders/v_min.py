"""Two stages a worker, laid out as a V, with a third of the activations of 1F1B: the least that a V can do with.

```
0 | F0.0 F0.1 .    .    .    F5.0 I5.0 W5.0 .    F5.1 I5.1 I0.0 W0.0 W5.1 .    I0.1 W0.1 U    U
1 | .    F1.0 F1.1 .    F4.0 .    .    I4.0 F4.1 W4.0 I1.0 I4.1 W1.0 W4.1 I1.1 W1.1 U    U    .
2 | .    .    F2.0 F3.0 F2.1 F3.1 .    .    I3.0 I2.0 W3.0 W2.0 I3.1 I2.1 W3.1 W2.1 U    U    .
```

V-Min (Qi et al. 2024, "Pipeline parallelism with controllable memory", section 4), squeezed as in `block`. A worker
holds 2 floor((p + 4) / 3) half-size stages, however many micro-batches there are. With equal times the makespan exceeds
the work by (4 p - 5) / 2 units of a whole worker's pass, one less where 3 | p; where forward and the halves of backward
differ, a bubble is left every period.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.block import Starts, squeezed
from fourfold.schedule.order import Pipelined, Shape
from fourfold.schedule.zigzag import fit


@dataclass(frozen=True)
class Options(Pipelined):
    """Settings."""

    @property
    def chunks(self) -> int:
        """Two halves of a V."""
        return 2


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield the squeezed blocks, worker by worker.

    Raises:
        ScheduleError: not two stages a worker.
    """
    del options
    fit(shape, 2, "v_min")
    p = shape.workers
    wait = 0 if p % 3 else 2  # keeps the four starts apart modulo the period
    return squeezed(shape, lambda i: Starts(i, 2 * p - i - 1, 2 * p + wait + i, 4 * p + wait - i - 1))
