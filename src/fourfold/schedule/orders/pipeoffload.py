"""Several stages a worker; what is kept longest waits on the host, copied out and back while others compute.

```
0 | F0.0 F0.1 F2.0 F2.1 .    .    B2.0 --   .    B2.1 --   B0.0 --   B0.1 --   U    U
1 | .    F1.0 F1.1 F3.0 B3.0 --   F3.1 B3.1 --   B1.0 --   B1.1 --   U    U    .    .
```

Out (O), and back (R), each half a unit long:

```
0 | .  O0 O1 .
1 | .  .  O0 O1
```

```
0 | .  .  .  .  .  .  .  .  R0 .  .  R1
1 | .  .  .  .  .  .  .  R0 .  R1 .  .
```

PipeOffload (Wan et al. 2025, "PipeOffload: improving scalability of pipeline parallelism with memory optimization"):
the passes of `interleaved`, in its time. A pass is offloaded if the time between its forward and its backward exceeds
three times that of both copies, those that wait longest first, and if it can be back in time; it comes back as late as
its backward allows. Either direction has a lane of its own. With copies of half a forward, at most three passes of a
worker's v chunks are held, where `interleaved` holds (v + 1) p - 1.

With a `group`, fewer forwards run ahead: without any offload a worker holds p + (v - 1) group. In groups of p that
takes no longer while transfers between workers are free, since none is hidden; smaller groups idle more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.schedule.action import Action, ScheduleError
from fourfold.schedule.looped import Looped, fit, forward_first
from fourfold.schedule.order import Shape
from fourfold.schedule.tiers import offload, reload, returned, with_room
from fourfold.schedule.work import B, F, Piece, Work, inputs

Pass = tuple[int, int]
"""(stage, micro-batch)."""
SECONDS = {F: 1.0, B: 2.0}
"""Times by which copies are planned."""
MARGIN = 3
"""A pass is offloaded if its wait is more than so many times what both copies take."""


@dataclass(frozen=True)
class Options(Looped):
    """Settings.

    Attributes:
        group: micro-batches that go through a chunk at a time, from half as many as workers to as many, with fewer
            forwards ahead than `interleaved`; None: as there.
        copy: time of one copy of what a stage keeps, one way, in times of its forward.
        share: of each worker's passes, the part that may be offloaded, from 0 to 1.
    """

    group: int | None = None
    copy: float = 0.5
    share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise ValueError(f"share: expected a part from 0 to 1, found {self.share}")
        if self.copy < 0:
            raise ValueError(f"copy: expected a time, in times of a forward, found {self.copy}")


class Wait(NamedTuple):
    """When a pass ends its forward and starts its backward, in planned times."""

    begins: float
    ends: float
    place: Pass


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield each worker's passes with the copies of those that are offloaded.

    Raises:
        ScheduleError: not `shape.chunks` stages a worker, a group of less than half of the workers or more than all, or
            micro-batches that are no multiple of it.
    """
    fit(shape, "pipeoffload")
    group, each = _group(shape, options), 2 if options.group is None else 1
    work, lines = Work(shape), list[list[Piece]]()
    for worker in range(shape.workers):
        ahead = (shape.chunks - 1) * group + each * (shape.workers - 1 - worker)
        lines.append(list(forward_first(shape, worker, ahead, group=group)))
    ends = _ends(lines, shape.stages - 1)
    for worker, line in enumerate(lines):
        plan = _planned(_chosen(line, ends, options), options.copy)
        yield from _copied(work.laid(worker, line), plan, [ends[piece] for piece in line])


def _group(shape: Shape, options: Options) -> int:
    workers, found = shape.workers, shape.microbatches
    group, least = workers if options.group is None else options.group, (workers + 1) // 2
    if not least <= group <= workers:
        raise ScheduleError(
            f"pipeoffload on {workers} workers: expected a group of {least} to {workers} micro-batches, found {group}; "
            f"try {min(max(group, least), workers)}"
        )
    if shape.chunks > 1 and found % group:
        nearest = max(group, (found + group // 2) // group * group)
        raise ScheduleError(
            f"pipeoffload sends {group} micro-batches at a time through each of {shape.chunks} chunks: expected a "
            f"multiple of {group}, found {found}; try {nearest} micro-batches"
        )
    return group


def _ends(lines: Sequence[Sequence[Piece]], last: int) -> dict[Piece, float]:
    """When each piece ends if there are no copies and transfers between workers take no time."""
    ends: dict[Piece, float] = {}
    places, free = [0] * len(lines), [0.0] * len(lines)
    waiting: dict[Piece, int] = {}
    ready = list(range(len(lines)))
    while ready:
        worker = ready.pop()
        line = lines[worker]
        while places[worker] < len(line):
            piece = line[places[worker]]
            needs = inputs(piece, last)
            missing = next((other for other in needs if other not in ends), None)
            if missing is not None:
                waiting[missing] = worker
                break
            free[worker] = max((free[worker], *(ends[other] for other in needs))) + SECONDS[piece[0]]
            ends[piece] = free[worker]
            places[worker] += 1
            if piece in waiting:
                ready.append(waiting.pop(piece))
    return ends


def _chosen(line: Sequence[Piece], ends: Mapping[Piece, float], options: Options) -> list[Wait]:
    """The passes that may be offloaded: of those that wait longest, those that wait long enough."""
    backwards = [(stage, microbatch) for kind, stage, microbatch in line if kind == B]
    waits = [Wait(ends[F, *place], ends[B, *place] - SECONDS[B], place) for place in backwards]
    waits.sort(key=lambda wait: wait.begins - wait.ends)
    least = MARGIN * 2 * options.copy + SECONDS[B]
    return [wait for wait in waits[: int(options.share * len(waits))] if wait.ends - wait.begins > least]


def _planned(chosen: Iterable[Wait], copy: float) -> list[tuple[float, Pass]]:
    """When each reload starts, in that sequence: each copy after the other, offloads soon and reloads late.

    What would have to come back before it is away stays.
    """
    late: list[tuple[float, Wait]] = []
    free = float("inf")
    for wait in sorted(chosen, key=lambda wait: wait.ends, reverse=True):
        free = min(wait.ends, free) - copy
        late.append((free, wait))
    plan: list[tuple[float, Pass]] = []
    free = 0.0
    for start, wait in sorted(late, key=lambda one: one[1].begins):
        away = max(wait.begins, free) + copy
        if away <= start:
            free = away
            plan.append((start, wait.place))
    return sorted(plan)


def _copied(actions: Iterable[Action], plan: Sequence[tuple[float, Pass]], ends: Sequence[float]) -> Iterator[Action]:
    """A worker's actions, an offload behind its forward and a reload behind the last piece that ends in time for it."""
    away = {place for _, place in plan}
    due: defaultdict[int, list[Pass]] = defaultdict(list)
    last = 0
    for start, place in plan:
        while last + 1 < len(ends) and ends[last + 1] <= start:
            last += 1
        due[last].append(place)
    for number, action in enumerate(actions):
        place = action.stage, action.microbatches.start
        back = action.kind == B and place in away
        yield with_room(returned(action, 1) if back else action, *due.get(number, ()))
        if action.kind == F and place in away:
            yield offload(*place, action.worker)
        for one in due.get(number, ()):
            yield reload(*one, action.worker)
