"""What a legal program is, checked before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from fourfold.schedule.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Buffer, ScheduleError
from fourfold.schedule.order import Shape
from fourfold.schedule.program import Program
from fourfold.schedule.simulate import simulate


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
    _check_frees(program)
    timeline = simulate(program, lambda action: 1.0)
    if budget is not None:
        for worker, peak in timeline.peaks(size).items():
            if peak > budget:
                raise ScheduleError(
                    f"worker {worker} holds buffers of {peak} at once, the budget is {budget}; "
                    "try an order with fewer micro-batches in flight, recomputation, or smaller micro-batches"
                )
    return program


def _check_coverage(program: Program, shape: Shape | None) -> None:
    counts: dict[str, Counter[tuple[int, int]]] = {
        kind: Counter() for kind in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    }
    for action in program.actions:
        if action.kind in counts:
            counts[action.kind].update((action.stage, microbatch) for microbatch in action.microbatches)
    covered = set[tuple[int, int]]().union(*counts.values())
    stages = shape.stages if shape else max((stage for stage, _ in covered), default=-1) + 1
    microbatches = shape.microbatches if shape else max((batch for _, batch in covered), default=-1) + 1
    if extra := [key for key in covered if key[0] >= stages or not 0 <= key[1] < microbatches]:
        raise ScheduleError(
            f"the order runs stage {extra[0][0]}, micro-batch {extra[0][1]}; "
            f"there are {stages} stages and {microbatches} micro-batches, counted from 0"
        )
    for stage in range(stages):
        for microbatch in range(microbatches):
            key = (stage, microbatch)
            if (forwards := counts[FORWARD][key]) != 1:
                raise ScheduleError(_times(FORWARD, key, forwards))
            halves = (counts[BACKWARD_INPUT][key], counts[BACKWARD_WEIGHT][key])
            if (counts[BACKWARD][key], *halves) not in ((1, 0, 0), (0, 1, 1)):
                if halves == (0, 0):
                    raise ScheduleError(_times(BACKWARD, key, counts[BACKWARD][key]))
                raise ScheduleError(
                    f"stage {stage}, micro-batch {microbatch}: expected one backward or one of each half, "
                    f"found {counts[BACKWARD][key]} whole, {halves[0]} for the input, {halves[1]} for the weight"
                )


def _times(kind: str, key: tuple[int, int], found: int) -> str:
    return f"{kind} of stage {key[0]}, micro-batch {key[1]}: expected exactly once, found {found} times"


def _check_frees(program: Program) -> None:
    """A reader that its own lane runs after the action that frees is not a deadlock to name, but a read too late."""
    freed: dict[tuple[Buffer, int], int] = {}
    for number, action in enumerate(program.actions):
        for buffer in action.frees:
            copy = (buffer, action.worker)
            if copy in freed:
                raise ScheduleError(f"{action} frees the {buffer}, which {program.actions[freed[copy]]} has freed")
            freed[copy] = number
    position = {number: place for numbers in program.lanes.values() for place, number in enumerate(numbers)}
    for number, action in enumerate(program.actions):
        for buffer in action.reads:
            killer = freed.get((buffer, action.where))
            if killer is None or killer == number or program.lane[killer] != program.lane[number]:
                continue
            if position[number] > position[killer]:
                raise ScheduleError(f"{action} reads the {buffer} after {program.actions[killer]} has freed it")
