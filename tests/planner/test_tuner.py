"""The search: few evaluations, the same at every run, and failures left alone."""

from __future__ import annotations

import math
from itertools import product

import pytest

from fourfold.planner.tuner import tune

POINTS = [(float(x), float(y)) for x, y in product(range(20), range(20))]


def bowl(index):
    x, y = POINTS[index]
    return math.exp(((x - 13) / 8) ** 2 + ((y - 4) / 5) ** 2)


@pytest.mark.parametrize("seed", range(5))
def test_the_bottom_of_a_bowl_in_a_tenth_of_the_points(seed):
    found = tune(POINTS, bowl, 40, seed)
    assert POINTS[found.best] == (13, 4) and found.cost == 1
    assert len(found.tried) == len(set(found.tried)) == 40


def test_the_same_seed_tries_the_same_points():
    assert tune(POINTS, bowl, 20, 3) == tune(POINTS, bowl, 20, 3) != tune(POINTS, bowl, 20, 4)


def test_failures_are_learned_from():
    """Half of the points fail, and cost alone would draw the search there."""

    def walled(index):
        x, y = POINTS[index]
        return None if y > 9 else 200 - 5 * y + abs(x - 13)

    found = tune(POINTS, walled, 60, 1)
    assert POINTS[found.best] == (13, 9)
    early, late = found.tried[:30], found.tried[30:]
    failed = [sum(walled(index) is None for index in part) for part in (early, late)]
    assert failed[1] < failed[0] < 30


def test_where_everything_fails_nothing_is_best():
    found = tune(POINTS, lambda index: None, 25)
    assert found.best == -1 and found.cost == math.inf and len(found.tried) == 25


def test_a_budget_beyond_all_points_tries_each_once():
    assert sorted(tune(POINTS[:12], bowl, 50).tried) == list(range(12))


@pytest.mark.parametrize(("points", "budget"), [([], 5), (POINTS, 0)])
def test_nothing_to_search_is_refused(points, budget):
    with pytest.raises(ValueError, match="tuner: expected points and a budget of at least 1"):
        tune(points, bowl, budget)
