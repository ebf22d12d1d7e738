"""Two stages a worker, laid out as a V: backward of the weight fills what is idle, and with equal parts, all of it.

```
0 | F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2 U    U    .
1 | .    F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2 U    U
```

ZB-V (Qi et al. 2023, "Zero bubble pipeline parallelism", section 6). With equal times the span of every worker is its
work, and the makespan exceeds that by (p - 1) T_F / 2; a worker holds at most 2 p of the half-size stages, as much as
1F1B's first. Other ratios leave bubbles, and the order stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.order import Pipelined, Shape
from fourfold.schedule.work import F, I, W, Work, in_turn
from fourfold.schedule.zigzag import fit


@dataclass(frozen=True)
class Options(Pipelined):
    """Settings."""

    @property
    def chunks(self) -> int:
        """Two halves of a V."""
        return 2


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield warm-up, steady state and drain of each worker.

    With fewer than 2 p - 1 micro-batches the order is that of 2 p - 1, without those that are not there.

    Raises:
        ScheduleError: not two stages a worker.
    """
    del options
    fit(shape, 2, "zb_v")
    work, size = Work(shape), max(shape.microbatches, 2 * shape.workers - 1)
    for worker in range(shape.workers):
        line = in_turn(_passes(worker, shape.workers, size))
        yield from work.laid(worker, (piece for piece in line if piece[2] < shape.microbatches))


def _passes(worker: int, workers: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Kind and stage of each piece; the outer stage is the worker's own number, the inner one as far from the end."""
    outer, inner, rest = worker, 2 * workers - 1 - worker, workers - worker
    both = microbatches - (workers + rest - 1)
    drain = [(I, outer), (W, outer), (F, inner), (I, inner), (W, inner)]
    yield from [(F, outer)] * (2 * rest - 1)
    yield from [(F, inner), (F, outer)] * worker
    yield from [(F, inner), (I, inner), (W, inner)] * rest
    yield from [(F, outer), *drain] * both
    yield from drain * (rest - 1)
    yield from [(I, outer), (I, inner)] * worker
    yield from [(I, outer), (W, outer)] * rest
    yield from [(W, inner)] * worker
    yield from [(W, outer)] * worker
