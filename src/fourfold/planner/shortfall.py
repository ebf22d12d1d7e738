"""What a step loses to another, part by part: what takes longer and what takes less, so that the parts add up."""

from __future__ import annotations

from collections import defaultdict

from fourfold.planner.clock import Timing

SHOWN = 3
"""Parts that are named; the others are one more."""


def shortfall(mine: Timing, its: Timing) -> str:
    """In words, by how much `mine` takes longer: `+18.1 ms: compute +94.0, waiting for z -75.9`.

    What begins with a minus takes less. Axes that are a part of one ("y/4") count as the whole.
    """
    more = _parts(mine, 1.0)
    for name, seconds in _parts(its, -1.0).items():
        more[name] += seconds
    net = sum(more.values())
    largest = max(map(abs, more.values()), default=0.0)
    unit, scale, digits = ("s", 1.0, 2) if largest >= 1 else ("ms", 1e3, 1)

    def written(seconds: float) -> str:
        text = f"{seconds * scale:+.{digits}f}"
        return text if float(text) else ""  # too little to be told

    if not written(net):
        return "as fast"
    ranked = sorted(more, key=lambda name: -abs(more[name]))
    told = {name: more[name] for name in ranked[:SHOWN]}
    told["others"] = sum(more[name] for name in ranked[SHOWN:])
    parts = [f"{name} {written(seconds)}" for name, seconds in told.items() if written(seconds)]
    return f"{written(net)} {unit}: {', '.join(parts)}"


def _parts(timing: Timing, sign: float) -> defaultdict[str, float]:
    """Seconds of every part of a step, times the sign; they add up to the whole."""
    found: defaultdict[str, float] = defaultdict(float)
    found["compute"] = sign * (timing.compute + timing.stretched)
    found["the update"] = sign * timing.update
    for axis, seconds in timing.exposed.items():
        found[f"waiting for {axis.partition('/')[0]}"] += sign * seconds
    return found
