"""Chimera: two pipelines in opposite directions fill each other's bubbles, on two copies of the weights."""

from __future__ import annotations

from fourfold.recipes._claim import Claim
from fourfold.recipes._pipeline import EPSILON, EXACT, difference, laid
from fourfold.schedule.costs import Costs
from fourfold.schedule.figures import bubble, held

SHAPES = ((4, 4), (4, 8), (8, 8), (8, 16))
"""Workers and micro-batches."""


def claim() -> Claim:
    """Li and Hoefler 2021, section 3; with forward and backward of equal length: (p - 2) / (2 m + p - 2) is idle."""
    predicted: dict[str, float] = {EXACT: 0.0}
    for p, m in SHAPES:
        predicted[f"bubble, p {p} m {m}"] = (p - 2) / (2 * m + p - 2)
        predicted[f"most in flight, p {p} m {m}"] = p
    return Claim(
        system="Chimera",
        paper="Li and Hoefler 2021, arXiv 2107.06925",
        statement="half of the bubble of one direction, with as much in flight; gradients equal one process's",
        predicted=predicted,
        measure=lambda: _figures("chimera"),
        control=lambda: _figures("1f1b"),
        off="one direction (1F1B)",
        tolerance=EPSILON,
    )


def _figures(name: str) -> dict[str, float]:
    figures = {EXACT: difference(name, 2, 4)}
    for p, m in SHAPES:
        timeline = laid(name, p, m, Costs(1.0, 0.5, 0.5))
        figures[f"bubble, p {p} m {m}"] = bubble(timeline)
        figures[f"most in flight, p {p} m {m}"] = max(held(timeline.program))
    return figures
