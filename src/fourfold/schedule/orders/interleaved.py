"""Several stages a worker, one forward and one backward in turn: filling takes a stage, not a worker's whole share.

```
0 | F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 .    B2.2 .    B2.3 B0.2 B0.3 U    U
1 | .    F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3 U    U    .
```

Interleaved 1F1B (Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2).
Times of a worker's whole share: the makespan is m (t_f + t_b) + (p - 1)(t_f + t_b) / v. Worker r of p holds
min(m v, (v - 1) p + 2 (p - 1 - r) + 1) of its v chunks' passes, and boundaries are sent v times as often.
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
    """Yield warm-up, steady state and drain of each worker.

    Raises:
        ScheduleError: not `shape.chunks` stages a worker, or micro-batches that are no multiple of the workers.
    """
    del options
    fit(shape, "interleaved")
    fit_rounds(shape, "interleaved")
    work, workers = Work(shape), shape.workers
    for worker in range(workers):
        ahead = (shape.chunks - 1) * workers + 2 * (workers - 1 - worker)
        yield from work.laid(worker, forward_first(shape, worker, ahead))
