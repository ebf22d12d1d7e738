"""DualPipe and DualPipeV: both ends feed, and the halves of a backward fill what is idle."""

from __future__ import annotations

from fourfold.recipes._claim import Claim
from fourfold.recipes._pipeline import EPSILON, EXACT, difference, laid
from fourfold.schedule.costs import Costs
from fourfold.schedule.figures import excess, held

WORKERS, MICROBATCHES = (4, 8), 20


def claim() -> Claim:
    """DeepSeek-AI 2024, section 3.2.1, and the table of its repository; pairs run one after the other here.

    Overlapping a forward with a backward hides messages of experts; without messages to hide, what is left of the claim
    is how much is idle and how much is held. The V's figures are those of torch's own order.
    """
    predicted: dict[str, float] = {f"{EXACT}, {name}": 0.0 for name in ("dualpipe", "dualpipev")}
    for p in WORKERS:
        predicted[f"idle, dualpipe, p {p}"] = p / 2 - 1
        predicted[f"most in flight, dualpipe, p {p}"] = p + 1
        predicted[f"most in flight, dualpipev, p {p}"] = 2 * p + 1
    return Claim(
        system="DualPipe, DualPipeV",
        paper="DeepSeek-AI 2024, arXiv 2412.19437",
        statement="(p/2 - 1)(F + I - W) is idle; p + 1 micro-batches in flight; gradients equal one process's",
        predicted=predicted,
        measure=lambda: _figures("dualpipe", "dualpipev"),
        control=lambda: _figures("gpipe", "gpipe"),
        off="one direction, and backward in one piece (GPipe)",
        tolerance=EPSILON * 10,
    )


def _figures(both: str, bent: str) -> dict[str, float]:
    figures = {f"{EXACT}, dualpipe": difference(both, 2, 4), f"{EXACT}, dualpipev": difference(bent, 2, 4)}
    for p in WORKERS:
        timeline = laid(both, p, MICROBATCHES, Costs(1.0, 1.0, 1.0))
        figures[f"idle, dualpipe, p {p}"] = excess(timeline)
        figures[f"most in flight, dualpipe, p {p}"] = max(held(timeline.program))
        figures[f"most in flight, dualpipev, p {p}"] = max(
            held(laid(bent, p, MICROBATCHES, Costs(0.5, 0.5, 0.5)).program)
        )
    return figures
