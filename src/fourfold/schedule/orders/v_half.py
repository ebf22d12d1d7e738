"""Two stages a worker, laid out as a V, with half of the activations of 1F1B and about half of its bubble.

```
0 | F0.0 F0.1 .    .    .    F5.0 I5.0 W5.0 .    .    F5.1 I5.1 I0.0 W0.0 W5.1 .    I0.1 W0.1 U    U
1 | .    F1.0 F1.1 .    F4.0 .    .    I4.0 W4.0 F4.1 I1.0 W1.0 I4.1 W4.1 .    I1.1 W1.1 U    U    .
2 | .    .    F2.0 F3.0 F2.1 F3.1 .    .    I3.0 I2.0 W3.0 W2.0 .    I3.1 I2.1 W3.1 W2.1 U    U    .
```

V-Half (Qi et al. 2024, "Pipeline parallelism with controllable memory", section 4), squeezed as in `block`. A worker
holds 2 floor((p + 2) / 2) half-size stages, however many micro-batches there are; with equal times and an even p the
makespan exceeds the work by (3 p - 7) / 2, in units of a whole worker's pass, for p of at least 4.
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
    fit(shape, 2, "v_half")
    p = shape.workers
    wait = 0 if p % 2 else 3  # keeps the four starts apart modulo the period
    return squeezed(shape, lambda i: Starts(2 * i, 3 * p - i - 2, 3 * p + wait + 2 * i - 1, 6 * p + wait - i - 2))
