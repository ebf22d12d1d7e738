"""All plans for a machine: those that fit, the fastest first, and those that do not, each with what bound it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fourfold.hardware import Cluster
from fourfold.plan import Plan
from fourfold.plan.plan import RECOMPUTE, SHARD
from fourfold.planner.forecast import Forecast, forecast
from fourfold.planner.subject import Subject
from fourfold.planner.traces import Traces

MOST_MICROBATCHES = 16


def search(
    subject: Subject | Traces,
    cluster: Cluster,
    *,
    world: int | None = None,
    precisions: Sequence[str] | None = None,
) -> list[Forecast]:
    """Forecast every plan for `world` ranks.

    Args:
        subject: what is trained.
        world: how many ranks; the whole cluster unless said.
        precisions: to consider; fp32, and bf16 where the devices are not processor cores.

    Returns:
        The plans that fit by likely time, then memory; after them the others, those nearest to fitting first.
    """
    traces = subject if isinstance(subject, Traces) else Traces(subject)
    world = world or cluster.world
    precisions = precisions or (("fp32",) if cluster.is_cpu else ("fp32", "bf16"))
    found = [forecast(traces, cluster, plan) for plan in candidates(world, traces.subject.rows, precisions=precisions)]
    return sorted(found, key=_rank)


def _rank(one: Forecast) -> tuple[bool, float, int]:
    if one.fits:
        return False, one.timing.total, one.peak
    return True, float(one.peak), one.peak


def candidates(world: int, rows: int, *, precisions: Sequence[str]) -> Iterator[Plan]:
    """Every data x z x shard x recompute x micro-batches x precision of `world` ranks, powers of two or not."""
    for z in range(1, world + 1):
        if world % z:
            continue
        for shard in SHARD if z > 1 else SHARD[:1]:
            if z > 1 and shard == "none":
                continue
            for precision in precisions:
                for recompute in RECOMPUTE:
                    for microbatches in _microbatches(world, rows):
                        yield Plan.of(
                            {
                                "placement": {
                                    "data": world // z,
                                    "z": z,
                                    "shard": shard,
                                    "recompute": recompute,
                                    "precision": precision,
                                },
                                "schedule": {"name": "accumulate", "microbatches": microbatches},
                            }
                        )


def _microbatches(world: int, rows: int) -> Iterator[int]:
    """One, and its doubles as long as every rank still has a row in each."""
    number = 1
    yield number
    while number * 2 * world <= rows and number * 2 <= MOST_MICROBATCHES:
        number *= 2
        yield number
