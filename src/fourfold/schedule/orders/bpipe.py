"""One forward, one backward, and the memory of early workers lent by late ones.

```
0 | F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5 U
1 | .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 U  .
2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 U  .  .
3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 U  .  .  .
```

From worker 0 to worker 3 (E), and back (L):

```
0 | .  .  .  E2 E3 .  .  .  .  E4
1 | .  .  .  .  .  .  .  .  .  .
2 | .  .  .  .  .  .  .  .  .  .
3 | .  .  .  .  .  .  .  .  .  .
```

```
0 | .  .  .  .  .  .  .  .  .  .  .  .  .
1 | .  .  .  .  .  .  .  .  .  .  .  .  .
2 | .  .  .  .  .  .  .  .  .  .  .  .  .
3 | .  .  .  .  .  .  .  .  L2 .  L3 .  L4
```

BPipe (Kim et al. 2023, "BPipe: memory-balanced pipeline parallelism"; re-evaluated by Huang et al. 2024): of p
workers, number x < p / 2 evicts to number p - 1 - x what it keeps beyond the cap, and loads it two backwards before it
is wanted. The makespan is that of 1F1B while a transfer takes no longer than a pass. Instant transfers let no worker
hold more than ceil((p + 2) / 2) stages, slow ones, of which a stage under way counts at both ends, p / 2 + 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fourfold.schedule.action import FORWARD, UPDATE, Action, ScheduleError
from fourfold.schedule.looped import fit, forward_first
from fourfold.schedule.order import Pipelined, Shape
from fourfold.schedule.tiers import evict, load, returned, with_room
from fourfold.schedule.work import Work

AHEAD = 2
"""A stash is loaded after the backward that is so many before its own."""
LEAST = AHEAD + 1
"""One in its backward or newly made, and those that are loaded."""


@dataclass(frozen=True)
class Options(Pipelined):
    """Settings.

    Attributes:
        cap: micro-batches that an early worker keeps at most; None: half of what 1F1B's first holds, and one more.
    """

    cap: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap is not None and self.cap < LEAST:
            raise ValueError(f"cap: expected at least {LEAST}, so that loads run ahead of backwards, found {self.cap}")


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield 1F1B's actions with the evictions and loads of each early worker.

    Raises:
        ScheduleError: not one stage a worker.
    """
    if shape.chunks != 1:
        raise ScheduleError(f"bpipe: expected one stage a worker, found {shape.chunks}; try chunks: 1")
    fit(shape, "bpipe")
    work, workers = Work(shape), shape.workers
    cap = max(workers // 2 + 1, LEAST) if options.cap is None else options.cap
    for worker in range(workers):
        actions = work.laid(worker, forward_first(shape, worker, workers - 1 - worker))
        holder = workers - 1 - worker
        yield from _relieved(list(actions), holder, cap) if worker < holder else actions


def _relieved(line: Sequence[Action], holder: int, cap: int) -> Iterator[Action]:
    """An early worker's actions: what would exceed the cap at its next forward goes to the holder."""
    held, away = 0, set[int]()
    for position, action in enumerate(line):
        batch, worker, stage = action.microbatches.start, action.worker, action.stage
        if action.kind == UPDATE:
            yield action
        elif action.kind == FORWARD:
            yield action
            held += 1
            if held + _growth(line[position + 1 : position + 3], away) > cap:
                yield evict(stage, batch, worker, holder)
                away.add(batch)
                held -= 1
        else:
            back, wanted = returned(action, 2) if batch in away else action, batch + AHEAD
            held -= 1
            if wanted in away:
                yield with_room(back, (stage, wanted))
                yield load(stage, wanted, worker, holder)
                held += 1
            else:
                yield back


def _growth(following: Sequence[Action], away: set[int]) -> int:
    """By how much more a worker holds once it has begun its next forward, if that comes before two backwards."""
    if not following or following[-1].kind != FORWARD and following[0].kind != FORWARD:
        return 0
    if following[0].kind == FORWARD:
        return 1
    return int(following[0].microbatches.start + AHEAD in away)
