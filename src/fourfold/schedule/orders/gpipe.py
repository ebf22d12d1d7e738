"""Fill the pipeline with every forward, then drain it with every backward (GPipe, Huang et al. 2019, section 2.3).

```
0 | F0 F1 F2 .  .  B2 B1 B0 U
1 | .  F0 F1 F2 B2 B1 B0 U
```

Stage s lives on worker s; what all micro-batches keep is alive at the turn. Makespan (m + p - 1)(t_f + t_b).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.order import Pipelined, Shape
from fourfold.schedule.work import B, F, Work


@dataclass(frozen=True)
class Options(Pipelined):
    """Settings."""


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield all forwards, all backwards in reverse, the updates."""
    del options
    work, every = Work(shape), range(shape.microbatches)
    for stage in range(shape.stages):
        forwards = ((F, stage, microbatch) for microbatch in every)
        backwards = ((B, stage, microbatch) for microbatch in reversed(every))
        yield from work.laid(stage, (*forwards, *backwards))
