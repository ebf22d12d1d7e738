"""A search that evaluates few points: Bayesian optimisation over a finite space, where some points fail.

For plans whose cost is known only by running them. One Gaussian process over what was tried says of every other point
what cost to expect and how surely, a second one whether it will fail; the next to be tried has the largest expected
improvement (Jones, Schonlau and Welch 1998, "Efficient Global Optimization") times the probability that it does not
fail. The same seed tries the same points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

FIRST = 10
"""Points that are tried before there is anything to learn from: drawn, each far from those before."""

CONSIDERED = 160
"""Points that are drawn for each choice, so that it takes no longer in large spaces and is not stuck in one corner."""

LENGTHS = (0.5, 1.0, 2.0)
"""Correlation lengths that are considered, of coordinates scaled to [0, 1]; the likeliest is taken."""

NOISE = 1e-4
"""Share of the variance that a process need not explain."""


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    Attributes:
        best: index of the best point; -1 if all that were tried failed.
        cost: its cost; infinity then.
        tried: indices in the order of trial.
    """

    best: int
    cost: float
    tried: tuple[int, ...]


def tune(points: Sequence[Sequence[float]], cost: Callable[[int], float | None], budget: int, seed: int = 0) -> Tuned:
    """Look for the point of the least cost.

    Args:
        points: coordinates of every point; orders of magnitude belong in as logarithms.
        cost: of the point with this index, above zero; None if it fails.
        budget: evaluations at the most.

    Raises:
        ValueError: no points, or a budget below one.
    """
    if not len(points) or budget < 1:
        raise ValueError(f"tuner: expected points and a budget of at least 1, found {len(points)} and {budget}")
    budget = min(budget, len(points))
    apart = _distances(np.asarray(points, dtype=np.float64))
    found: dict[int, float | None] = {}
    random = np.random.default_rng(seed)
    for index in _spread(apart, min(FIRST, budget), random):
        found[index] = cost(index)
    while len(found) < budget:
        rest = np.setdiff1d(np.arange(len(apart)), list(found))
        index = _promising(apart, found, random.choice(rest, size=min(len(rest), CONSIDERED), replace=False))
        found[index] = cost(index)
    costs = {index: value for index, value in found.items() if value is not None}
    best = min(costs, key=lambda index: costs[index], default=-1)
    return Tuned(best, costs.get(best, math.inf), tuple(found))


def _distances(points: np.ndarray) -> np.ndarray:
    """Between all pairs, coordinates scaled to [0, 1]."""
    span = np.ptp(points, 0)
    places = (points - points.min(0)) / np.where(span > 0, span, 1.0)
    return np.linalg.norm(places[:, None] - places[None], axis=-1)


def _spread(apart: np.ndarray, count: int, random: np.random.Generator) -> list[int]:
    """A drawn point, then always the one of some drawn that is farthest from all before."""
    chosen = [int(random.integers(len(apart)))]
    while len(chosen) < count:
        drawn = np.setdiff1d(random.choice(len(apart), size=min(len(apart), 32), replace=False), chosen)
        if len(drawn):
            chosen.append(int(drawn[apart[drawn][:, chosen].min(1).argmax()]))
    return chosen


def _promising(apart: np.ndarray, found: dict[int, float | None], rest: np.ndarray) -> int:
    """Of these points, which have not been tried, the one that promises the most."""
    worked = {index: math.log(value) for index, value in found.items() if value is not None}
    promise = _works(apart, found, rest)
    if len(worked) > 1:
        values = np.array(list(worked.values()))
        values = (values - values.mean()) / (values.std() or 1.0)
        mean, deviation = _predict(apart, list(worked), values, rest)
        promise = promise * _improvement(values.min() - mean, deviation)
    return int(rest[promise.argmax()])


def _works(apart: np.ndarray, found: dict[int, float | None], asked: np.ndarray) -> np.ndarray:
    """Probability that these points do not fail."""
    signs = np.array([-1.0 if value is None else 1.0 for value in found.values()])
    if (signs == signs[0]).all():
        return np.ones(len(asked))
    mean, deviation = _predict(apart, list(found), signs - signs.mean(), asked)
    return _normal((mean + signs.mean()) / deviation)


def _predict(
    apart: np.ndarray, tried: Sequence[int], values: np.ndarray, asked: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of the process at the asked points, with the likeliest correlation length."""
    known = np.asarray(tried)
    among, across = apart[known][:, known], apart[asked][:, known]
    factors = {length: np.linalg.cholesky(_matern(among, length) + NOISE * np.eye(len(tried))) for length in LENGTHS}
    halves = {length: _solved(factor, values[:, None])[:, 0] for length, factor in factors.items()}
    length = max(LENGTHS, key=lambda one: -0.5 * halves[one] @ halves[one] - np.log(np.diag(factors[one])).sum())
    explained = _solved(factors[length], _matern(across, length).T)
    return explained.T @ halves[length], np.sqrt(np.maximum(1.0 - (explained**2).sum(0), 1e-12))


def _solved(lower: np.ndarray, right: np.ndarray) -> np.ndarray:
    """x of lower · x = right: numpy knows no triangles, and takes n³ steps for what takes n²."""
    return torch.linalg.solve_triangular(torch.from_numpy(lower), torch.from_numpy(right), upper=False).numpy()


def _matern(distance: np.ndarray, length: float) -> np.ndarray:
    """Matérn correlation of order 5/2."""
    far = math.sqrt(5) / length * distance
    return (1 + far + far**2 / 3) * np.exp(-far)


def _improvement(gain: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Expected improvement of a normal variable whose mean is better by `gain`."""
    ratio = gain / deviation
    return gain * _normal(ratio) + deviation * np.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)


def _normal(values: np.ndarray) -> np.ndarray:
    """Distribution function of the standard normal."""
    return np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in values])
