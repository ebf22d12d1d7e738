"""Orders that never empty their pipeline, cut into windows: what one step runs, and what it hands to the next.

```
0 | F0 F1 F2 .  .  B0 U  F3 / B1 U  F4 / B2 U  F5 / ...
1 | .  F0 F1 .  B0 U  F2 / B1 U  F3 / B2 U  F4 / ...
2 | .  .  F0 B0 U  F1 / B1 U  F2 / B2 U  F3 / ...
```

A window's end is a place in every worker's list, not a moment: a worker goes on to the next window while others are in
this one. It lies after the forward that follows an update, where what every later action needs is a buffer of a known
worker: stashes and versions of weights, which stay, and one activation a stage, which the next window moves first. So
the cut costs nothing, and all windows of a pipeline that is full are the same program.

Numbers in a window count from its own beginning: micro-batch 0 is the first that goes backward in it, and version 0 the
weight that is newest when a stage begins it, -1 the one before. What a window keeps is given to the next under the
names that `Window.handed` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fourfold.schedule.action import (
    ACTIVATION,
    BACKWARD,
    FORWARD,
    PREDICT,
    PREDICTED,
    STASH,
    UPDATE,
    WEIGHT,
    Action,
    Buffer,
    ScheduleError,
)
from fourfold.schedule.bind import bind
from fourfold.schedule.order import Shape
from fourfold.schedule.program import Program
from fourfold.schedule.simulate import simulate
from fourfold.schedule.validate import check_frees
from fourfold.schedule.work import Work

Entry = tuple[str, int]
"""(kind, micro-batch or, of an update, which): one line of a stage's list."""


@dataclass(frozen=True)
class Window:
    """Some optimizer steps of an order that goes on.

    Attributes:
        actions: each worker's in running order.
        given: what lies there when it begins, and on which worker.
        kept: what it leaves.
        updates: of each stage.
        microbatches: that go backward in it.
    """

    actions: tuple[Action, ...]
    given: dict[Buffer, int]
    kept: dict[Buffer, int]
    updates: int
    microbatches: int

    @property
    def handed(self) -> dict[Buffer, Buffer]:
        """What is kept, and what the next window calls it."""
        return {buffer: _renamed(buffer, -self.microbatches, -self.updates) for buffer in self.kept}

    def program(self, workers: int) -> Program:
        """The window bound to workers, and checked.

        Raises:
            ScheduleError: it deadlocks, or reads what is not given, not written, or freed.
        """
        program = bind(self.actions, workers, self.given)
        check_frees(program)
        simulate(program, [0.0] * len(program.actions))
        return program


@dataclass(frozen=True)
class Stream:
    """One forward and one backward in turn for ever, one stage a worker; stage s holds p - s micro-batches.

    Attributes:
        shape: stages and workers; its micro-batches do not matter.
        microbatches: whose gradients an update takes.
        version: (kind, stage, micro-batch) → the version of the weight that the pass reads, counted from the run's
            beginning, as micro-batches are.
        guessed: (stage, micro-batch) → the version that both passes guess from the one that they read; None: neither
            guesses.
    """

    shape: Shape
    microbatches: int
    version: Callable[[str, int, int], int]
    guessed: Callable[[int, int], int] | None = None

    def whole(self, order: str) -> Iterator[Action]:
        """From the first forward to the last backward of the shape's micro-batches.

        Raises:
            ScheduleError: the last update would take fewer micro-batches.
        """
        updates, rest = divmod(self.shape.microbatches, self.microbatches)
        if rest:
            raise ScheduleError(
                f"{order} updates after every {self.microbatches} micro-batches: expected a multiple of them, "
                f"found {self.shape.microbatches}; try {self.shape.microbatches - rest or self.microbatches}"
            )
        yield from self.window(0, updates, last=True).actions

    def window(self, begin: int, end: int, *, last: bool = False) -> Window:
        """Updates begin … end - 1 of every stage, and the forwards that follow them.

        Args:
            begin: 0: of an empty pipeline, which it fills. From `settled` on, windows of equal length are equal.
            end: one more than the last update.
            last: it drains the pipeline: no micro-batch goes in that these updates do not take.

        Raises:
            ScheduleError: no update, or a last window too short for what is in flight.
        """
        self._check(begin, end, last)
        actions: list[Action] = []
        for stage in range(self.shape.stages):
            actions += self._stage(stage, begin, end, last)
        micro, versions = -begin * self.microbatches, -begin
        return Window(
            tuple(_renumbered(action, micro, versions) for action in actions),
            {_renamed(one, micro, versions): worker for one, worker in self._at(begin).items()},
            {_renamed(one, micro, versions): worker for one, worker in self._at(end, last).items()},
            end - begin,
            (end - begin) * self.microbatches,
        )

    @property
    def settled(self) -> int:
        """After so many updates no pass reads a version that the run began with only for want of an older one."""
        return 2 + 2 * self.shape.stages // self.microbatches

    def _check(self, begin: int, end: int, last: bool) -> None:
        flying = min(begin, 1) * self.shape.stages  # micro-batches in flight on the first stage
        least = begin + max(1, -(-flying // self.microbatches) if last else 1)
        if end < least:
            raise ScheduleError(
                f"a window that begins at update {begin} with {flying} micro-batches in flight"
                f"{' and drains them' if last else ''}: expected an end of at least {least}, found {end}"
            )

    def _line(self, stage: int, begin: int, end: int, last: bool) -> Iterator[Entry]:
        """A stage's part of a window."""
        m, flying = self.microbatches, self.shape.stages - stage
        stop = end * m if last else None
        if not begin:
            yield from ((FORWARD, k) for k in range(flying if stop is None else min(flying, stop)))
        for k in range(begin * m, end * m):
            yield BACKWARD, k
            if k % m == m - 1:
                yield UPDATE, k // m
            if stop is None or k + flying < stop:
                yield FORWARD, k + flying

    def _later(self, stage: int, end: int) -> Iterator[Entry]:
        """What follows a window that is not the last, until no pass reads a version that there was at its end."""
        return self._line(stage, end, end + self.settled, last=False)

    def _reads(self, stage: int, entry: Entry) -> int:
        kind, number = entry
        return number if kind == UPDATE else self.version(kind, stage, number)

    def _stage(self, stage: int, begin: int, end: int, last: bool) -> Iterator[Action]:
        """The actions of a stage; the last to read a version of its weight frees it."""
        line = list(self._line(stage, begin, end, last))
        every = line if last else [*line, *self._later(stage, end)]
        until = {self._reads(stage, entry): place for place, entry in enumerate(every)}
        for place, entry in enumerate(line):
            version = self._reads(stage, entry)
            dies = (Buffer(WEIGHT, stage, -1, version),) if until[version] == place else ()
            first, *others = self._actions(stage, entry, version)
            yield first._replace(frees=first.frees + dies)
            yield from others

    def _actions(self, stage: int, entry: Entry, version: int) -> Iterator[Action]:
        """The one that reads the weight, and the pass itself where its weight is guessed."""
        work, (kind, number) = Work(self.shape), entry
        if kind == UPDATE:
            batches = range(number * self.microbatches, (number + 1) * self.microbatches)
            update = work.update(stage, stage, batches, version)
            yield update._replace(frees=update.frees[1:])
            return
        action = work.piece(kind, stage, number, stage, version)
        aim = version if self.guessed is None else self.guessed(stage, number)
        if aim == version:
            yield action
            return
        weight, guess = action.reads[0], Buffer(PREDICTED[kind], stage, number, aim)
        yield Action(PREDICT, stage, action.microbatches, stage, "compute", (weight,), (guess,))
        yield action._replace(reads=(guess, *action.reads[1:]), frees=(guess, *action.frees))

    def _at(self, cut: int, last: bool = False) -> dict[Buffer, int]:
        """What lies where after so many updates of every stage; nothing is in flight after the last."""
        found = {}
        for stage in range(self.shape.stages):
            found[Buffer(WEIGHT, stage, -1, cut)] = stage
            if last or not cut:
                continue
            first, stop = cut * self.microbatches, cut * self.microbatches + self.shape.stages - stage
            found |= {Buffer(STASH, stage, k): stage for k in range(first, stop)}
            if stage < self.shape.stages - 1:
                found[Buffer(ACTIVATION, stage, stop - 1)] = stage
            versions = {self._reads(stage, entry) for entry in self._later(stage, cut)}
            found |= {Buffer(WEIGHT, stage, -1, version): stage for version in sorted(versions) if version < cut}
        return found


def _renamed(buffer: Buffer, microbatches: int, versions: int) -> Buffer:
    """The buffer, if micro-batches and versions are counted from elsewhere."""
    if buffer.kind == WEIGHT or buffer.kind in PREDICTED.values():
        buffer = buffer._replace(version=buffer.version + versions)
    return buffer if buffer.kind == WEIGHT else buffer._replace(microbatch=buffer.microbatch + microbatches)


def _renumbered(action: Action, microbatches: int, versions: int) -> Action:
    batches = action.microbatches
    reads, writes, frees = (
        tuple(_renamed(buffer, microbatches, versions) for buffer in buffers)
        for buffers in (action.reads, action.writes, action.frees)
    )
    shifted = range(batches.start + microbatches, batches.stop + microbatches)
    return action._replace(microbatches=shifted, reads=reads, writes=writes, frees=frees)
