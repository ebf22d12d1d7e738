"""Zero bubble: backward in two halves, of which nobody waits for the one by the weight."""

from __future__ import annotations

from fourfold.recipes._claim import Claim
from fourfold.recipes._pipeline import EPSILON, EXACT, difference, laid
from fourfold.schedule.costs import Costs
from fourfold.schedule.figures import span_bubble

WORKERS, MICROBATCHES = 4, 12
TIMES = (1.0, 1.2, 0.8)
"""Of forward, backward by the input and by the weight, of a worker's share."""


def claim() -> Claim:
    """Qi et al. 2023, table 2 (H1, H2) and section 6 (ZB-V); idle time between a worker's first pass and its last."""
    p, (forward, by_input, by_weight) = WORKERS, TIMES
    return Claim(
        system="Zero bubble pipeline parallelism",
        paper="Qi et al. 2023, arXiv 2401.10241",
        statement="idle time as published; none on a V if all three take equally long; gradients equal one process's",
        predicted={
            **{f"{EXACT}, {name}": 0.0 for name in ("zb_h1", "zb_h2", "zb_v")},
            "idle, zb_h1": (p - 1) * (forward + by_input - by_weight),
            "idle, zb_h2": (p - 1) * (forward + by_input - 2 * by_weight),
            "idle, zb_v": 0.0,
        },
        measure=lambda: _figures(("zb_h1", "zb_h2", "zb_v")),
        control=lambda: _figures(("1f1b", "1f1b", "1f1b")),
        off="backward in one piece (1F1B)",
        tolerance=EPSILON * 100,
    )


def _figures(ran: tuple[str, ...]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, really in zip(("zb_h1", "zb_h2", "zb_v"), ran, strict=True):
        figures[f"{EXACT}, {name}"] = difference(really, 2, 4)
        half = 2 if really == "zb_v" else 1
        times = (1.0, 1.0, 1.0) if name == "zb_v" else TIMES
        costs = Costs(*(time / half for time in times))
        figures[f"idle, {name}"] = span_bubble(laid(really, WORKERS, MICROBATCHES, costs))
    return figures
