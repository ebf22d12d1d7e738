"""A timeline as a staircase of text: one row a worker, one column a unit of time."""

from __future__ import annotations

from fourfold.schedule.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, UPDATE, Action
from fourfold.schedule.program import Lane
from fourfold.schedule.timeline import Timeline

LETTERS = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W", UPDATE: "U"}


def draw(timeline: Timeline, unit: float = 1.0, lane: str = "compute") -> str:
    """Draw one lane of every worker.

    `F0` is the forward of micro-batch 0 (`F2.0` that of stage 2, where a worker has several stages), B a backward,
    I and W its halves, U the update; `--` continues the action to the left, `.` is idle.

    Args:
        timeline: of a simulation or a run.
        unit: seconds a column. A start is rounded to the nearest column; an action is at least one column wide.
        lane: the lane to draw.
    """
    program = timeline.program
    begin = min((start for _, start, _ in timeline), default=0.0)
    rows: list[dict[int, str]] = []
    for worker in range(program.workers):
        numbers = program.lanes.get(Lane(worker, lane), ())
        several = len({program.actions[number].stage for number in numbers}) > 1
        row: dict[int, str] = {}
        for number in numbers:
            start, end = timeline.starts[number], timeline.ends[number]
            if start is None or end is None:
                continue
            first, stop = round((start - begin) / unit), round((end - begin) / unit)
            for column in range(first, max(stop, first + 1)):
                row[column] = label(program.actions[number], several) if column == first else "--"
        rows.append(row)
    columns = max((max(row, default=-1) for row in rows), default=-1) + 1
    width = max((len(cell) for row in rows for cell in row.values()), default=1)
    names = len(str(program.workers - 1))
    lines = [
        f"{worker:>{names}} | " + " ".join(row.get(column, ".").ljust(width) for column in range(columns)).rstrip()
        for worker, row in enumerate(rows)
    ]
    return "\n".join(lines) + "\n"


def label(action: Action, several: bool) -> str:
    """The short name of an action; with its stage, where its worker runs `several`."""
    letter = LETTERS.get(action.kind, action.kind[:1].upper())
    if action.kind == UPDATE:
        return letter
    return f"{letter}{action.stage}.{action.microbatches.start}" if several else f"{letter}{action.microbatches.start}"
