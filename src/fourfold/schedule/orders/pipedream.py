"""One forward, one backward, for ever: a stage updates as soon as it can, and keeps the weights of what is in flight.

```
0 | F0 F1 F2 .  .  B0 U  F3 B1 U  F4 B2 U  F5 B3 U  .  B4 U  .  B5 U
1 | .  F0 F1 .  B0 U  F2 B1 U  F3 B2 U  F4 B3 U  F5 B4 U  .  B5 U  .
2 | .  .  F0 B0 U  F1 B1 U  F2 B2 U  F3 B3 U  F4 B4 U  F5 B5 U  .  .
```

PipeDream (Narayanan et al. 2019, section 3.3). No worker ever waits once the pipeline is full. A forward takes the
newest weight of its stage, and the backward of a micro-batch the one that its forward took. With one micro-batch an
update, stage s of p makes p - 1 - s updates in between and keeps p - s weights,
w_{t+1} = w_t - lr grad f(w_1^{t-p+1}, ..., w_p^t); `vertical` takes w^{t-p+1} on all stages, and keeps p on each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.looped import fit
from fourfold.schedule.order import Microbatches, Shape
from fourfold.schedule.window import Stream


@dataclass(frozen=True)
class Options(Microbatches):
    """Settings; an update takes the gradients of `microbatches`.

    Attributes:
        vertical: all stages take the version that the first took for a micro-batch.
    """

    vertical: bool = False


def stream(shape: Shape, options: Options) -> Stream:
    """The order as it goes on, window after window.

    Raises:
        ScheduleError: not one stage a worker.
    """
    fit(shape, "pipedream")
    m, p = options.microbatches, shape.stages

    def newest(kind: str, stage: int, microbatch: int) -> int:
        del kind  # the backward's is that of the forward
        flying = p if options.vertical else p - stage
        return max(0, microbatch - flying + 1) // m

    return Stream(shape, m, newest)


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield all updates of the shape's micro-batches, from an empty pipeline to an empty pipeline.

    Raises:
        ScheduleError: not one stage a worker, or a last update of fewer micro-batches.
    """
    yield from stream(shape, options).whole("pipedream")
