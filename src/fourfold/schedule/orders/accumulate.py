"""Gradient accumulation: forward and backward of one micro-batch after the other, then the update.

```
0 | F0 B0 F1 B1 F2 B2 U
```

One worker holds every stage; what forward keeps of one micro-batch is alive at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.order import Microbatches, Shape
from fourfold.schedule.work import B, F, Work


@dataclass(frozen=True)
class Options(Microbatches):
    """Settings."""


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield the actions; the shape's micro-batches are those of the options unless a caller lays it over others."""
    del options
    stages = range(shape.stages)
    pieces = (
        (kind, stage, microbatch)
        for microbatch in range(shape.microbatches)
        for kind, line in ((F, stages), (B, reversed(stages)))
        for stage in line
    )
    yield from Work(shape).laid(0, pieces)
