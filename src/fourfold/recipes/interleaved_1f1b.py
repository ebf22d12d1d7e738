"""Interleaved 1F1B: several stages a worker make the bubble as many times smaller."""

from __future__ import annotations

from fourfold.recipes._claim import Claim
from fourfold.recipes._pipeline import EPSILON, EXACT, difference, laid
from fourfold.schedule.costs import Costs
from fourfold.schedule.figures import held

SHAPES = ((4, 8, 2), (4, 8, 4), (8, 16, 2))
"""Workers p, micro-batches m, chunks v."""
FORWARD, BACKWARD = 1.0, 2.0
"""Of a worker's whole share."""


def claim() -> Claim:
    """Narayanan et al. 2021, section 2.2: bubble time ÷ ideal time = (p - 1) / (v m), with m a multiple of p."""
    predicted: dict[str, float] = {EXACT: 0.0}
    for p, m, v in SHAPES:
        predicted[f"bubble ÷ work, p {p} m {m} v {v}"] = (p - 1) / (v * m)
        predicted[f"most in flight, p {p} m {m} v {v}"] = min(m * v, (v - 1) * p + 2 * (p - 1) + 1)
    return Claim(
        system="PTD-P (Megatron-LM), interleaved schedule",
        paper="Narayanan et al. 2021, arXiv 2104.04473",
        statement="bubble over work is (p-1)/(v m); in flight as published; gradients equal one process's",
        predicted=predicted,
        measure=lambda: _figures(interleaved=True),
        control=lambda: _figures(interleaved=False),
        off="one stage a worker (1F1B)",
        tolerance=EPSILON,
    )


def _figures(*, interleaved: bool) -> dict[str, float]:
    name = "interleaved" if interleaved else "1f1b"
    figures = {EXACT: difference(name, 2, 4)}
    for p, m, v in SHAPES:
        chunks, options = (v, {"chunks": v}) if interleaved else (1, {})
        costs = Costs(FORWARD / chunks, BACKWARD / 2 / chunks, BACKWARD / 2 / chunks)
        timeline = laid(name, p, m, costs, **options)
        work = m * (FORWARD + BACKWARD)
        figures[f"bubble ÷ work, p {p} m {m} v {v}"] = (timeline.makespan - work) / work
        figures[f"most in flight, p {p} m {m} v {v}"] = max(held(timeline.program))
    return figures
