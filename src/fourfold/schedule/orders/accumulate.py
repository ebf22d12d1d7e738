"""Gradient accumulation: forward and backward of one micro-batch after the other, then the update.

```
0 | F0 B0 F1 B1 F2 B2 U
```

One worker holds every stage; activations of one micro-batch are alive at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    BACKWARD,
    FORWARD,
    GRADIENT,
    UPDATE,
    WEIGHT,
    Action,
    Buffer,
)
from fourfold.schedule.order import Shape


@dataclass(frozen=True)
class Options:
    """Settings.

    Attributes:
        microbatches: parts into which the rows of one optimizer step are cut.
    """

    microbatches: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            raise ValueError(f"microbatches: expected a whole number of at least 1, found {self.microbatches!r}")


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield the actions; the shape's micro-batches are those of the options unless a caller lays it over others."""
    del options
    stages = range(shape.stages)
    for microbatch in range(shape.microbatches):
        for stage in stages:
            yield _forward(stage, microbatch)
        for stage in reversed(stages):
            yield _backward(stage, microbatch, last=stage == stages[-1])
    every = range(shape.microbatches)
    for stage in stages:
        old, new = Buffer(WEIGHT, stage), Buffer(WEIGHT, stage, version=1)
        gradients = tuple(Buffer(GRADIENT, stage, microbatch) for microbatch in every)
        yield Action(UPDATE, stage, every, 0, reads=(old, *gradients), writes=(new,), frees=(old, *gradients))


def _forward(stage: int, microbatch: int) -> Action:
    incoming = (Buffer(ACTIVATION, stage - 1, microbatch),) if stage else ()
    return Action(
        FORWARD,
        stage,
        range(microbatch, microbatch + 1),
        worker=0,
        reads=(Buffer(WEIGHT, stage), *incoming),
        writes=(Buffer(ACTIVATION, stage, microbatch),),
    )


def _backward(stage: int, microbatch: int, last: bool) -> Action:
    activation = Buffer(ACTIVATION, stage, microbatch)
    incoming = () if last else (Buffer(ACTIVATION_GRADIENT, stage + 1, microbatch),)
    outgoing = (Buffer(ACTIVATION_GRADIENT, stage, microbatch),) if stage else ()
    return Action(
        BACKWARD,
        stage,
        range(microbatch, microbatch + 1),
        worker=0,
        reads=(Buffer(WEIGHT, stage), activation, *incoming),
        writes=(Buffer(GRADIENT, stage, microbatch), *outgoing),
        frees=(activation, *incoming),
    )
