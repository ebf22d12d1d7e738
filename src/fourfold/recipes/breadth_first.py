"""Breadth-first pipelines: sharded weights are gathered once a chunk and pass, not once a micro-batch."""

from __future__ import annotations

from fourfold.placement.layout import Layout
from fourfold.placement.traffic import Pass, Shipment
from fourfold.recipes._claim import Claim
from fourfold.recipes._pipeline import EPSILON, EXACT, difference, laid
from fourfold.schedule.action import BACKWARD, FORWARD
from fourfold.schedule.costs import Costs
from fourfold.schedule.figures import held, passes
from fourfold.schedule.timeline import Timeline

WORKERS, MICROBATCHES, CHUNKS = 4, 8, 2


def claim() -> Claim:
    """Lamy-Poirier 2022, section 4: one gather forward and one backward a chunk; the bubble of interleaving."""
    p, m, v = WORKERS, MICROBATCHES, CHUNKS
    return Claim(
        system="Breadth-first pipeline parallelism",
        paper="Lamy-Poirier 2022, arXiv 2211.05953",
        statement="a chunk's passes of all micro-batches follow one another; bubble over work is (p-1)/(v m)",
        predicted={
            EXACT: 0.0,
            "runs of one chunk and direction, a worker": 2 * v,
            "bubble ÷ work": (p - 1) / (v * m),
            "most in flight": m * v,
            "gathers of weights kept while in flight": v,
        },
        measure=lambda: _figures("breadth_first"),
        control=lambda: _figures("interleaved"),
        off="depth first (interleaved 1F1B)",
        tolerance=EPSILON,
    )


def _figures(name: str) -> dict[str, float]:
    costs = Costs(1 / CHUNKS, 1 / CHUNKS, 1 / CHUNKS)
    timeline = laid(name, WORKERS, MICROBATCHES, costs, chunks=CHUNKS)
    work = MICROBATCHES * 3.0
    return {
        EXACT: difference(name, 2, 4, chunks=2),
        "runs of one chunk and direction, a worker": max(_runs(timeline, worker) for worker in range(WORKERS)),
        "bubble ÷ work": (timeline.makespan - work) / work,
        "most in flight": max(held(timeline.program)),
        "gathers of weights kept while in flight": _gathers(timeline),
    }


def _runs(timeline: Timeline, worker: int) -> int:
    """How often a worker turns to another chunk, or from forward to backward."""
    actions = timeline.program.actions
    line = [(actions[number].kind, actions[number].stage) for number in passes(timeline.program, worker)]
    return 1 + sum(one != other for one, other in zip(line, line[1:], strict=False))


def _gathers(timeline: Timeline) -> int:
    """Of all chunks of worker 0, whose weights stay while one of its micro-batches is in flight."""
    actions = timeline.program.actions
    kinds = {FORWARD: True, BACKWARD: False}
    own = [actions[number] for number in passes(timeline.program, 0)]
    line = [Pass(kinds[action.kind], action.stage) for action in own]
    stages = sorted({action.stage for action in own})
    return sum(Shipment(Layout.of([], 2), outer=True, stages=frozenset({stage})).gathers(line) for stage in stages)
