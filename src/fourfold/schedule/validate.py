"""What a legal program is, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from fourfold.schedule.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Buffer, ScheduleError
from fourfold.schedule.collector import resting
from fourfold.schedule.order import Shape
from fourfold.schedule.program import Program
from fourfold.schedule.simulate import simulate

KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
ONCE = ((1, 1, 0, 0), (1, 0, 1, 1))
"""How often each kind may run for one stage and micro-batch."""


@resting()
def validate(
    program: Program,
    shape: Shape | None = None,
    *,
    budget: int | None = None,
    size: Callable[[Buffer], int] = lambda buffer: 1,
) -> Program:
    """Return the program if it is legal.

    It is legal when every stage runs forward and backward (whole, or both halves) exactly once for every micro-batch,
    no buffer is read after it was freed, no worker holds more than the budget, and it does not deadlock.

    Args:
        program: what `bind` returned.
        shape: stages and micro-batches that must be covered; None: those that the program mentions.
        budget: most bytes of buffers that one worker may hold at once, in units of `size`.
        size: bytes of a buffer.

    Raises:
        ScheduleError: names the action, what was expected and found.
    """
    _check_coverage(program, shape)
    check_frees(program)
    timeline = simulate(program, [1.0] * len(program.actions))
    if budget is not None:
        for worker, peak in timeline.peaks(size).items():
            if peak > budget:
                raise ScheduleError(
                    f"worker {worker} holds buffers of {peak} at once, the budget is {budget}; "
                    "try an order with fewer micro-batches in flight, recomputation, or smaller micro-batches"
                )
    return program


def _check_coverage(program: Program, shape: Shape | None) -> None:
    passes = [action for action in program.actions if action.kind in KINDS]
    stages = shape.stages if shape else max((action.stage for action in passes), default=-1) + 1
    microbatches = shape.microbatches if shape else max((action.microbatches[-1] for action in passes), default=-1) + 1
    counts = {kind: [0] * (stages * microbatches) for kind in KINDS}
    for action in passes:
        for microbatch in action.microbatches:
            if action.stage >= stages or not 0 <= microbatch < microbatches:
                raise ScheduleError(
                    f"the order runs stage {action.stage}, micro-batch {microbatch}; "
                    f"there are {stages} stages and {microbatches} micro-batches, counted from 0"
                )
            counts[action.kind][action.stage * microbatches + microbatch] += 1
    for place, found in enumerate(zip(*counts.values(), strict=True)):
        if found not in ONCE:
            _refuse(*divmod(place, microbatches), *found)


def _refuse(stage: int, microbatch: int, forward: int, whole: int, first: int, second: int) -> NoReturn:
    where = f"stage {stage}, micro-batch {microbatch}"
    if forward != 1:
        raise ScheduleError(f"{FORWARD} of {where}: expected exactly once, found {forward} times")
    if not first and not second:
        raise ScheduleError(f"{BACKWARD} of {where}: expected exactly once, found {whole} times")
    raise ScheduleError(
        f"{where}: expected one backward or one of each half, "
        f"found {whole} whole, {first} for the input, {second} for the weight"
    )


def check_frees(program: Program) -> None:
    """A reader that its own lane runs after the action that frees is not a deadlock to name, but a read too late."""
    position = [0] * len(program.actions)
    for numbers in program.lanes.values():
        for place, number in enumerate(numbers):
            position[number] = place
    lane = program.lane
    for life in program.lives:
        killer = life.freer
        if killer is None:
            continue
        for user in life.users:
            if position[user] > position[killer] and lane[user] == lane[killer]:
                raise ScheduleError(
                    f"{program.actions[user]} reads the {life.buffer} after {program.actions[killer]} has freed it"
                )
