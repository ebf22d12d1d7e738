"""Two pipelines in opposite directions, in eight phases, with forwards and backwards of the two in pairs.

```
0 | F0.0 F0.2 F0.4 F3.1 I3.1 W3.1 F3.3 F0.6 B3.3 --   F3.5 B0.0 --   B3.5 --   F3.7 .    B0.2 --   B3.7 --   I0.4 W0.4 I0.6 W0.6 U    U
1 | .    F1.0 F2.1 F1.2 F2.3 F1.4 B2.1 --   F2.5 B1.0 --   F1.6 B2.3 --   F2.7 B1.2 --   B2.5 --   B1.4 --   I2.7 I1.6 W2.7 W1.6 U    U
2 | .    F1.1 F2.0 F1.3 F2.2 F1.5 B2.0 --   F2.4 B1.1 --   F1.7 B2.2 --   F2.6 B1.3 --   B2.4 --   B1.5 --   I2.6 I1.7 W2.6 W1.7 U    U
3 | F0.1 F0.3 F0.5 F3.0 I3.0 W3.0 F3.2 F0.7 B3.2 --   F3.4 B0.1 --   B3.4 --   F3.6 .    B0.3 --   B3.6 --   I0.5 W0.5 I0.7 W0.7 U    U
```

DualPipe (DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1). The even micro-batches run down the workers,
the odd ones up, through a second copy of every stage; the gradients of both copies are summed before either is updated.
The paper overlaps what one of a pair sends with what the other computes; here a pair is the forward and, right after
it, the backward. So the makespan exceeds the work by (p / 2 - 1)(T_F + T_I - T_W); a worker holds p + 1 micro-batches.
"""  # noqa: E501 (a drawing)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.mirror import fit, shares
from fourfold.schedule.order import Pipelined, Shape
from fourfold.schedule.work import B, F, I, W, Work, in_turn


@dataclass(frozen=True)
class Options(Pipelined):
    """Settings."""


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield the phases of each worker.

    Raises:
        ScheduleError: an odd number of workers or micro-batches, not one stage a worker, fewer than 2 p micro-batches.
    """
    del options
    p = shape.workers
    fit(shape, 2 * p, "dualpipe")
    work, ways = Work(shape), shares(shape)
    for worker in range(p):
        depth = min(worker, p - 1 - worker)
        own, other = ways if worker == depth else ways[::-1]
        share = {depth: own, p - 1 - depth: other}
        line = in_turn(phases(depth, p // 2, outer=depth, inner=p - 1 - depth, microbatches=shape.microbatches // 2))
        yield from work.laid(worker, ((kind, stage, share[stage][turn]) for kind, stage, turn in line), ways)


def phases(depth: int, half: int, outer: int, inner: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Kind and stage of each piece of one worker, in the eight phases of the report.

    The last three halve what they can of the backwards, and fill what is idle with the weights' halves, oldest first.

    Args:
        depth: how far the worker is from its end of the pipeline, from 0.
        half: how far it is from there to the middle, in workers.
        outer: the stage that its own end feeds.
        inner: the stage that is fed from the middle.
        microbatches: of each of the two stages; at least `2 * half`.
    """
    near, far = depth + 1, half - depth - 1
    yield from [(F, outer)] * (2 * far)
    yield from [(F, outer), (F, inner)] * near
    yield from [(I, inner), (W, inner), (F, inner)] * far
    yield from [(F, outer), (B, inner), (F, inner), (B, outer)] * (microbatches - 2 * half + near)
    yield from [(B, inner), (F, inner), (B, outer)] * far
    stages = [inner, outer] * near
    yield from ((B, stage) for stage in stages[:near])
    yield from ((I, stage) for stage in stages[near:])
    deferred = [*stages[near:], *[outer] * far]
    for stage in deferred[:far]:
        yield W, stage
        yield I, outer
    yield from ((W, stage) for stage in deferred[far:])
