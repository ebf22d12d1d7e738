import math

import pytest

from fourfold.report.chart import BOTTOM, HEIGHT, LEFT, MOST_POINTS, RIGHT, TOP, WIDTH, Line, chart, short, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (1.9, 8.1, [0, 2, 4, 6, 8, 10]), (0, 100, [0, 20, 40, 60, 80, 100]), (3, 3, [3])],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_corners():
    drawn = chart("loss", [Line("loss", "first", [(0, 0.0), (10, 10.0)])], "step")
    assert drawn is not None
    marks = drawn.lines[0].marks
    assert (marks[0].x, marks[0].y, marks[1].x, marks[1].y) == (LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, TOP)
    assert drawn.lines[0].path == f"M{marks[0].x} {marks[0].y} L{marks[1].x} {marks[1].y}"
    assert drawn.lines[0].marks[1].text == "step 10: loss 10"


def test_one_point_and_none():
    drawn = chart("loss", [Line("loss", "first", [(5, 2.0)])], "step")
    assert drawn is not None and drawn.lines[0].path.startswith("M")
    assert chart("loss", [Line("loss", "first", [])], "step") is None
    assert chart("loss", [Line("loss", "first", [(1, math.nan)])], "step") is None


def test_long_lines_are_thinned_to_means_and_end_where_they_end():
    drawn = chart("loss", [Line("loss", "first", [(step, 1.0) for step in range(10_001)])], "step")
    assert drawn is not None
    marks = drawn.lines[0].marks
    assert len(marks) <= MOST_POINTS and marks[-1].text == "step 10000: loss 1"


def test_short():
    assert [short(value) for value in (0, 12, 1500, 1_234_567, 2e9)] == ["0", "12", "1.5k", "1.235M", "2G"]
