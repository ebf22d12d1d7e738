"""Hanayo: more waves, a smaller bubble, on one copy of the weights."""

from __future__ import annotations

from fourfold.recipes._claim import Claim
from fourfold.recipes._pipeline import EPSILON, EXACT, difference, laid
from fourfold.schedule.action import MOVE, WEIGHT
from fourfold.schedule.costs import Costs
from fourfold.schedule.timeline import Timeline

WORKERS, MICROBATCHES, WAVES = 4, 8, (1, 2, 3)


def claim() -> Claim:
    """Liu et al. 2023, section 3; the closed form was found by simulation: m (f + b) + (p - 1)(f + b) / (2 W)."""
    predicted: dict[str, float] = {EXACT: 0.0, "copies of a weight": 1.0}
    for waves in WAVES:
        predicted[f"makespan, {waves} waves"] = MICROBATCHES * 2 + (WORKERS - 1) * 2 / (2 * waves)
        turns = 2 * waves - 1
        predicted[f"moves a micro-batch, {waves} waves"] = 2 * (2 * waves * WORKERS - 1 - turns)
    return Claim(
        system="Hanayo",
        paper="Liu et al. 2023, arXiv 2308.15762",
        statement="the bubble falls with the waves; a turn needs no message; one copy of the weights",
        predicted=predicted,
        measure=lambda: _figures(WAVES),
        control=lambda: _figures((1,) * len(WAVES)),
        off="one wave, whatever was asked for",
        tolerance=EPSILON,
    )


def _figures(ran: tuple[int, ...]) -> dict[str, float]:
    figures = {EXACT: difference("hanayo", 2, 4)}
    for waves, really in zip(WAVES, ran, strict=True):
        part = 1 / (2 * really)
        timeline = laid("hanayo", WORKERS, MICROBATCHES, Costs(part, part / 2, part / 2), waves=really)
        figures[f"makespan, {waves} waves"] = timeline.makespan
        moves = sum(action.kind == MOVE for action in timeline.program.actions)
        figures[f"moves a micro-batch, {waves} waves"] = moves / MICROBATCHES
        figures["copies of a weight"] = _copies(timeline)
    return figures


def _copies(timeline: Timeline) -> float:
    """On how many workers each stage's weights are read, at most."""
    homes: dict[int, set[int]] = {}
    for action in timeline.program.actions:
        if action.kind != MOVE:
            for buffer in action.reads:
                if buffer.kind == WEIGHT:
                    homes.setdefault(buffer.stage, set()).add(action.worker)
    return float(max(map(len, homes.values())))
