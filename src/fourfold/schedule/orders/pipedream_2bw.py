"""One forward, one backward, for ever, with two weights a stage: the newest, and that of the batch before.

```
0 | F0 F1 F2 .  .  B0 F3 B1 F4 B2 U  F5 B3 F6 B4 F7 B5 U  F8 B6 .  B7 .  B8 U
1 | .  F0 F1 .  B0 F2 B1 F3 B2 U  F4 B3 F5 B4 F6 B5 U  F7 B6 F8 B7 .  B8 U  .
2 | .  .  F0 B0 F1 B1 F2 B2 U  F3 B3 F4 B4 F5 B5 U  F6 B6 F7 B7 F8 B8 U  .  .
```

PipeDream-2BW (Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", section 3.1). An update takes
m micro-batches, at least as many as there are stages. All stages work on all of them with the weight that the update
before last made, the newest that every stage has when the first of them comes to it. So every gradient is late by
exactly one update, w_{t+1} = w_t - lr grad f(w_{t-1}), and two weights are enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action, ScheduleError
from fourfold.schedule.looped import fit
from fourfold.schedule.order import Microbatches, Shape
from fourfold.schedule.window import Stream


@dataclass(frozen=True)
class Options(Microbatches):
    """Settings; an update takes the gradients of `microbatches`."""


def stream(shape: Shape, options: Options) -> Stream:
    """The order as it goes on, window after window.

    Raises:
        ScheduleError: not one stage a worker, or fewer micro-batches an update than stages.
    """
    fit(shape, "pipedream_2bw")
    m = options.microbatches
    if m < shape.stages:
        raise ScheduleError(
            f"pipedream_2bw has up to {shape.stages} micro-batches in flight and two weights for them: expected at "
            f"least {shape.stages} micro-batches an update, found {m}; try {shape.stages}, or pipedream"
        )
    return Stream(shape, m, lambda kind, stage, microbatch: max(0, microbatch // m - 1))


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield all updates of the shape's micro-batches, from an empty pipeline to an empty pipeline.

    Raises:
        ScheduleError: not one stage a worker, too few micro-batches an update, or a last update of fewer.
    """
    yield from stream(shape, options).whole("pipedream_2bw")
