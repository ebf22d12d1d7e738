"""One forward, one backward, for ever, with one weight a stage: passes guess what the weight will have become.

```
0 | F0 F1 F2 .  .  B0 U  F3 B1 U  F4 B2 U  F5 B3 U  .  B4 U  .  B5 U
1 | .  F0 F1 .  B0 U  F2 B1 U  F3 B2 U  F4 B3 U  F5 B4 U  .  B5 U  .
2 | P0 .  F0 B0 U  F1 B1 U  F2 B2 U  F3 B3 U  F4 B4 U  F5 B5 U  .  .
```

SpecTrain (Chen et al. 2018, section 3). No weight is kept for what is in flight. Before either pass of a micro-batch,
the weight that its stage will have when the micro-batch has come all the way back is predicted from the newest:
w - s lr v, with the optimizer's velocity v. With one micro-batch an update, and a backward as long as a forward, stage
k of p looks s = k // 2 + p - k - 1 updates ahead in a forward, and k // 2 in a backward. (P is one, of no length here.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import FORWARD, Action
from fourfold.schedule.looped import fit
from fourfold.schedule.order import Microbatches, Shape
from fourfold.schedule.window import Stream


@dataclass(frozen=True)
class Options(Microbatches):
    """Settings; an update takes the gradients of `microbatches`."""


def stream(shape: Shape, options: Options) -> Stream:
    """The order as it goes on, window after window.

    Raises:
        ScheduleError: not one stage a worker.
    """
    fit(shape, "spectrain")
    m, p = options.microbatches, shape.stages

    def newest(kind: str, stage: int, microbatch: int) -> int:
        return max(0, microbatch - (p - stage) + 1) // m if kind == FORWARD else microbatch // m

    return Stream(shape, m, newest, lambda stage, microbatch: (microbatch + stage // 2) // m)


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield all updates of the shape's micro-batches, from an empty pipeline to an empty pipeline.

    Raises:
        ScheduleError: not one stage a worker, or a last update of fewer micro-batches.
    """
    yield from stream(shape, options).whole("spectrain")
