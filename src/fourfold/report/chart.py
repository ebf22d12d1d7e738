"""Line charts as numbers: where the lines, ticks and labels of an SVG lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 860, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 12, 34
MOST_POINTS = 400
"""A line of more points is drawn as the means of as many stretches."""


@dataclass(frozen=True)
class Line:
    """One line: its name, its class in the style sheet, its points in data coordinates."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Mark:
    """A point that tells its value when pointed at."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Tick:
    """A tick of an axis: where, and what it says."""

    at: float
    text: str


@dataclass(frozen=True)
class Drawn:
    """A line in the coordinates of the picture."""

    name: str
    style: str
    path: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Chart:
    """Everything that the template draws."""

    title: str
    lines: tuple[Drawn, ...]
    xs: tuple[Tick, ...]
    ys: tuple[Tick, ...]
    x_label: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def chart(title: str, lines: Sequence[Line], x_label: str, digits: int = 3, *, from_zero: bool = False) -> Chart | None:
    """Lay lines out over common axes; None if no line has a finite point.

    Args:
        title: for those who cannot see the picture.
        lines: in drawing order.
        x_label: what x counts.
        digits: significant digits of a value that is pointed at.
        from_zero: the y axis begins at zero: for quantities whose ratio one wants to see.
    """
    kept = [(line, _thinned([point for point in line.points if all(map(math.isfinite, point))])) for line in lines]
    points = [point for _, found in kept for point in found]
    if not points:
        return None
    x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points), wanted=8)
    y_ticks = ticks(0.0 if from_zero else min(y for _, y in points), max(y for _, y in points))
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(y_ticks[0], *(y for _, y in points)), max(y_ticks[-1], *(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - y_low) / (y_high - y_low) if y_high > y_low else 0.5
        return round(LEFT + across * (WIDTH - RIGHT - LEFT), 1), round(
            HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP), 1
        )

    drawn = []
    for line, found in kept:
        placed = [place(x, y) for x, y in found]
        path = "M" + " L".join(f"{x} {y}" for x, y in placed) if placed else ""
        marks = tuple(
            Mark(x, y, f"{x_label} {at:g}: {line.name} {value:.{digits}g}")
            for (x, y), (at, value) in zip(placed, found, strict=True)
        )
        drawn.append(Drawn(line.name, line.style, path, marks))
    return Chart(
        title=title,
        lines=tuple(drawn),
        xs=tuple(Tick(place(tick, y_low)[0], f"{tick:g}") for tick in x_ticks if x_low <= tick <= x_high),
        ys=tuple(Tick(place(x_low, tick)[1], short(tick)) for tick in y_ticks),
        x_label=x_label,
    )


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten apart) around the range; at least one."""
    if high <= low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / wanted))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= wanted)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]


def short(value: float) -> str:
    """A number in few characters: 12.5k, 3.2M."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{letter}"
    return f"{value:.4g}"


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / MOST_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
