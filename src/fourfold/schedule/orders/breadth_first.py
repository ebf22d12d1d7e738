"""Several stages a worker, each of which runs all micro-batches before the worker's next stage begins.

```
0 | F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 .    .    B2.2 B2.1 B2.0 B0.2 B0.1 B0.0 U    U
1 | .    F1.0 F1.1 F1.2 F3.0 F3.1 F3.2 B3.2 B3.1 B3.0 B1.2 B1.1 B1.0 U    U    .
```

Breadth-first (Lamy-Poirier 2022, section 3). From p micro-batches on, the makespan is that of `interleaved`; all
m v passes of a worker's v chunks are held at the turn. What is gained is that a chunk's weights are wanted in two
stretches only: where they are sharded, one gather each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.looped import Looped, fit
from fourfold.schedule.order import Shape
from fourfold.schedule.work import B, F, Work

KEEPS = True
"""Gathered weights stay for the next micro-batch of the same stretch."""


@dataclass(frozen=True)
class Options(Looped):
    """Settings."""


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield all forwards of each worker, chunk by chunk, and its backwards in reverse.

    Raises:
        ScheduleError: not `shape.chunks` stages a worker.
    """
    del options
    fit(shape, "breadth_first")
    work = Work(shape)
    for worker in range(shape.workers):
        stages = range(worker, shape.stages, shape.workers)
        places = [(stage, microbatch) for stage in stages for microbatch in range(shape.microbatches)]
        forwards = ((F, stage, microbatch) for stage, microbatch in places)
        backwards = ((B, stage, microbatch) for stage, microbatch in reversed(places))
        yield from work.laid(worker, (*forwards, *backwards))
