"""A schedule's timeline as a picture: one row a worker, one box an action, its length the time it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from fourfold.schedule import Timeline
from fourfold.schedule.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from fourfold.schedule.draw import label
from fourfold.schedule.program import Lane

COLOURS = {FORWARD: "#7aa6da", BACKWARD: "#6fb98f", BACKWARD_INPUT: "#6fb98f", BACKWARD_WEIGHT: "#b7d9c4"}
OTHER = "#c9c9c9"
WIDTH, ROW, GAP, LEFT = 1200, 26, 4, 36


@dataclass(frozen=True)
class Box:
    """An action in the picture.

    Attributes:
        x, width: across, in pixels.
        worker: the row.
        text: what is written in it.
        title: what it says when pointed at.
        colour: of its kind.
    """

    x: float
    width: float
    worker: int
    text: str
    title: str
    colour: str


def svg(timeline: Timeline, lane: str = "compute") -> str:
    """The picture of one lane of every worker, as one SVG document."""
    program = timeline.program
    height = program.workers * (ROW + GAP) + GAP
    rows = [f'<text x="4" y="{_top(worker) + ROW - 8}" class="n">{worker}</text>' for worker in range(program.workers)]
    drawn = [
        f'<g><title>{escape(box.title)}</title><rect x="{box.x:.1f}" y="{_top(box.worker)}" width="{box.width:.1f}" '
        f'height="{ROW}" fill="{box.colour}" stroke="#fff"/>'
        f'<text x="{box.x + 2:.1f}" y="{_top(box.worker) + ROW - 8}">{escape(box.text)}</text></g>'
        for box in boxes(timeline, lane)
    ]
    style = "text{font:11px sans-serif;fill:#222}.n{fill:#666}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">\n'
        f"<style>{style}</style>\n" + "\n".join([*rows, *drawn]) + "\n</svg>\n"
    )


def boxes(timeline: Timeline, lane: str = "compute") -> Iterator[Box]:
    """Every action of a lane that takes time."""
    program = timeline.program
    begin = min((start for _, start, _ in timeline), default=0.0)
    scale = (WIDTH - LEFT - GAP) / (timeline.makespan or 1.0)
    for worker in range(program.workers):
        numbers = program.lanes.get(Lane(worker, lane), ())
        several = len({program.actions[number].stage for number in numbers}) > 1
        for number in numbers:
            start, end = timeline.starts[number], timeline.ends[number]
            if start is None or end is None or end == start:
                continue
            action, width = program.actions[number], (end - start) * scale
            text = label(action, several)
            shown = text if width > 7 * len(text) else ""
            x = LEFT + (start - begin) * scale
            yield Box(x, width, worker, shown, _title(action, start - begin, end - begin), _colour(action))


def _title(action: Action, start: float, end: float) -> str:
    return f"{action}: {start:g} to {end:g}"


def _colour(action: Action) -> str:
    return COLOURS.get(action.kind, OTHER)


def _top(worker: int) -> int:
    return GAP + worker * (ROW + GAP)
