"""Bytes that a pipeline's rank holds, walked along a timeline: what passes leave behind, what comes, and how high."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.planner.stage import Rise, Stage
from fourfold.schedule import Action, Buffer, Timeline
from fourfold.schedule.action import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
)

PASSES = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
"""Kinds of action, in the order of `Stage.rises`."""

Sized = Callable[[int, int], Stage]
"""`sized(stage, microbatch)`: what a stage costs that micro-batch."""


class High(NamedTuple):
    """The highest moment of a rank.

    Attributes:
        held: what passes have left behind.
        boundary: what has come from other ranks, or waits to go.
        rise: what the pass that runs holds beyond that.
        when: the pass, in words.
    """

    held: int = 0
    boundary: int = 0
    rise: Rise = Rise()
    when: str = "at rest"

    @property
    def total(self) -> int:
        """All of it."""
        return self.held + self.boundary + self.rise.total


@dataclass
class _Level:
    held: int = 0
    boundary: int = 0
    rise: Rise = Rise()
    when: str = "at rest"
    highest: High = High()

    def look(self) -> None:
        if self.held + self.boundary + self.rise.total > self.highest.total:
            self.highest = High(self.held, self.boundary, self.rise, self.when)


def walk(timeline: Timeline, sized: Sized) -> list[High]:
    """Every worker's highest moment.

    A value that comes is there from the beginning of its way; the one it was made from lies in the stash of the stage
    that made it. Gradients that go back lie where they were made until they are gone.
    """
    program, starts, ends = timeline.program, timeline.starts, timeline.ends
    moments: list[list[tuple[float, int, int]]] = [[] for _ in range(program.workers)]
    came: list[set[Buffer]] = [set() for _ in range(program.workers)]
    for number, action in enumerate(program.actions):
        start, end = starts[number], ends[number]
        assert start is not None and end is not None
        if action.source is not None:
            came[action.worker].add(action.reads[0])
            moments[action.worker].append((start, 1, number))
            if action.reads[0].kind == ACTIVATION_GRADIENT:
                moments[action.source].append((end, 0, number))
        elif action.kind in PASSES:
            moments[action.worker] += [(start, 2, number), (end, 0, number)]
    return [
        _highest(worker, sorted(listed), program.actions, came[worker], sized) for worker, listed in enumerate(moments)
    ]


def _highest(
    worker: int, moments: list[tuple[float, int, int]], actions: tuple[Action, ...], came: set[Buffer], sized: Sized
) -> High:
    level = _Level()
    for _, kind, number in moments:
        action = actions[number]
        if action.source is not None:
            nbytes = _content(action.reads[0], sized)
            level.boundary += nbytes if kind else -nbytes
        elif kind:
            stage = sized(action.stage, action.microbatches.start)
            level.rise, level.when = stage.rises[PASSES.index(action.kind)], str(action)
        else:
            level.rise = Rise()
            _settle(level, action, came, sized)
            continue
        level.look()
    return level.highest


def _content(buffer: Buffer, sized: Sized) -> int:
    """Bytes of what crosses."""
    if buffer.kind == ACTIVATION:
        return sized(buffer.stage + 1, buffer.microbatch).given
    return sized(buffer.stage, buffer.microbatch).back if buffer.kind == ACTIVATION_GRADIENT else 0


def _settle(level: _Level, action: Action, came: set[Buffer], sized: Sized) -> None:
    """What a pass leaves behind, and what it has used up."""
    number, microbatch = action.stage, action.microbatches.start
    stage = sized(number, microbatch)
    if action.kind == FORWARD:
        level.held += stage.stash
        return
    if action.kind == BACKWARD_WEIGHT:
        level.held -= stage.deferred
        return
    level.held -= stage.stash
    if action.kind == BACKWARD_INPUT:
        level.held += stage.deferred
    for buffer in action.reads:
        if buffer.kind == ACTIVATION_GRADIENT:
            level.boundary -= _content(buffer, sized)
    if Buffer(ACTIVATION, number - 1, microbatch) in came:
        level.boundary -= stage.given
    level.boundary += stage.back
