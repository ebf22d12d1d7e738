"""Two stages a worker, so timed that the early layers, whose activations live longest, wait for nothing.

```
0 | F0.0 .    F2.0 F0.1 .    .    B2.0 --   F2.1 .    .    .    B2.1 --   R0.0 B0.0 --   R0.1 B0.1 --   U    U
1 | .    F1.0 .    F3.0 B3.0 --   F1.1 .    .    F3.1 B3.1 --   R1.0 B1.0 --   R1.1 B1.1 --   U    U    .    .
```

ChronosPipe (2025, arXiv 2503.03182), rebuilt from its idea: each micro-batch runs through all stages and back without a
pause but those that let the passes of a worker tile its period, and the next one follows a period later. With backwards
twice as long as forwards the makespan is that of 1F1B, (m + p - 1)(t_f + t_b), and a worker holds at most 3 p / 2 + 1
of its half-size stages (and a half, if p is odd), where 1F1B holds 2 p and `interleaved` 3 p - 1. With `recompute`, the
first half of the layers, whose activations make up most of that, is recomputed: p / 2 + 1 are held, at half of the work
of recomputing everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.looped import fit
from fourfold.schedule.order import Pipelined, Shape
from fourfold.schedule.recompute import recomputed
from fourfold.schedule.work import B, F, Piece, Work

FORWARD_TIME, BACKWARD_TIME = 1, 2
PERIOD = 2 * (FORWARD_TIME + BACKWARD_TIME)
"""Of one worker and micro-batch; half of it lies between the passes of a worker's two stages."""


@dataclass(frozen=True)
class Options(Pipelined):
    """Settings.

    Attributes:
        recompute: whether the stages of the first half keep their input only.
    """

    recompute: bool = True

    @property
    def chunks(self) -> int:
        """One of the early layers and one of the late."""
        return 2


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield each worker's passes in the sequence in which they start.

    Raises:
        ScheduleError: not two stages a worker.
    """
    fit(shape, "chronospipe")
    work = Work(shape)
    for worker in range(shape.workers):
        actions = work.laid(worker, _line(worker, shape))
        yield from recomputed(actions, range(shape.workers)) if options.recompute else actions


def _line(worker: int, shape: Shape) -> list[Piece]:
    """A worker's passes; equal starts, between which its predecessor decides, backward first."""
    starts = _starts(worker, shape.workers)
    passes = [
        (start + PERIOD * microbatch, kind == F, microbatch, kind, stage)
        for (kind, stage), start in starts.items()
        for microbatch in range(shape.microbatches)
    ]
    return [(kind, stage, microbatch) for _, _, microbatch, kind, stage in sorted(passes)]


def _starts(worker: int, workers: int) -> dict[tuple[str, int], int]:
    """When micro-batch 0's passes start on one worker, if nothing else ran."""
    half, rest = PERIOD // 2, workers - 1 - worker
    late = _later(workers * FORWARD_TIME, half)
    turn = late + workers * FORWARD_TIME
    home = turn + _later(workers * BACKWARD_TIME, half)
    return {
        (F, worker): worker * FORWARD_TIME,
        (F, workers + worker): late + worker * FORWARD_TIME,
        (B, workers + worker): turn + rest * BACKWARD_TIME,
        (B, worker): home + rest * BACKWARD_TIME,
    }


def _later(moment: int, offset: int) -> int:
    """The first moment, from this one on, that is `offset` after a whole number of periods."""
    return moment + (offset - moment) % PERIOD
