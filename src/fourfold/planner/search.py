"""All plans for a machine: those that fit, the fastest first, and those that do not, each with what bound it.

Plans that cut rows and states are all forecast. Grids that cut features, too, are many, and each needs a trace of its
own: closed forms (`grids`) rank them, and the best few are traced where they may win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fourfold.hardware import Cluster
from fourfold.plan import Plan
from fourfold.plan.plan import RECOMPUTE, SHARD
from fourfold.planner.forecast import Forecast, ForecastError, forecast
from fourfold.planner.grids import Ranked, rank_grids
from fourfold.planner.likeness import network
from fourfold.planner.network import Network
from fourfold.planner.squares import Square, sent, squares
from fourfold.planner.subject import Subject
from fourfold.planner.tolls import AXES, Factors, Job
from fourfold.planner.traces import Traces
from fourfold.planner.units import in_bytes

T = TypeVar("T")

MOST_MICROBATCHES = 16

MOST_TRACED = 4
"""Grids that cut features and are traced in one search."""

PROMISING = 1.1
"""A grid is traced if its closed form takes at most so many times as long as that of the best plan without."""

MOST_SQUARES = 2
"""Grids of the algorithms 2d, 2.5d and 3d that are traced in one search: those that send least."""

CHUNKS = (2, 4)
"""Pieces that the products of the best plan are cut into, if it cuts features and waits for their sums."""

WORTH = 0.98
"""A plan in chunks must take less than this share of the time of the same one without."""

ITEMSIZES = {"fp32": 4, "bf16": 2, "fp64": 8}


@dataclass(frozen=True)
class Estimate:
    """A grid that was not traced.

    Attributes:
        ranked: its closed form, at its best job.
        behind: in words, why it cannot be, or what it loses to the closed form of the best plan.
    """

    ranked: Ranked
    behind: str


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        forecasts: in full, ranked.
        estimated: grids that cut features, by closed form alone: ranked, those that cannot be last.
        left_out: why no grid that cuts features was looked at; or why some of the algorithms 2d, 2.5d and 3d were not.
    """

    forecasts: tuple[Forecast, ...]
    estimated: tuple[Estimate, ...] = ()
    left_out: tuple[str, ...] = ()


def search(
    subject: Subject | Traces,
    cluster: Cluster,
    *,
    world: int | None = None,
    precisions: Sequence[str] | None = None,
) -> list[Forecast]:
    """Forecast every plan for `world` ranks, and the most promising of those that cut features.

    Args:
        subject: what is trained.
        world: how many ranks; the whole cluster unless said.
        precisions: to consider; fp32, and bf16 where the devices are not processor cores.

    Returns:
        The plans that fit by likely time, then memory; after them the others, those nearest to fitting first.
    """
    traces = subject if isinstance(subject, Traces) else Traces(subject)
    return list(look(traces, cluster, world=world, precisions=precisions).forecasts)


def silent(text: str) -> None:
    """Nobody wants to know how far a search has come."""


def look(
    traces: Traces,
    cluster: Cluster,
    *,
    world: int | None = None,
    precisions: Sequence[str] | None = None,
    tell: Callable[[str], None] = silent,
) -> Found:
    """The same, with what was estimated alone.

    Args:
        tell: is told which plan of how many is being forecast.
    """
    world = world or cluster.world
    precisions = precisions or (("fp32",) if cluster.is_cpu else ("fp32", "bf16"))
    rows = traces.subject.rows
    plans = list(candidates(world, rows, precisions=precisions))
    found = [forecast(traces, cluster, plan) for plan in _counted("plan", plans, tell)]
    likeness = network(traces)
    if world == 1 or likeness is None:
        problems = traces.anatomy.problems or ("it has no blocks of linears that could be cut",)
        why = (f"no features are cut over x and y: {problems[0]}",) if world > 1 else ()
        return Found(tuple(sorted(found, key=_rank)), left_out=why)
    ranked = rank_grids(likeness, cluster, world, jobs=jobs(world, rows, precisions))
    refused: dict[Factors, str] = {}
    traced: set[Factors] = set()
    for one in _counted("grid", _promising(ranked, any(plain.fits for plain in found)), tell):
        try:
            found += _forecasts(traces, cluster, one)
            traced.add(one.grid)
        except ForecastError as error:
            refused[one.grid] = str(error)
    left_out: list[str] = []
    for square, reason in _squares(likeness, ranked, any(one.fits for one in found)):
        tell(f"grid {square}")
        try:
            found += [] if reason else _forecasts_of_square(traces, cluster, square, ranked)
        except ForecastError as error:
            reason = str(error)
        left_out += [f"{square}: {reason}"] if reason else []
    found.sort(key=_rank)
    found = [*_in_chunks(traces, cluster, found[0]), *found]
    untraced = [replace(one, bound=refused.get(one.grid, one.bound)) for one in ranked if one.grid not in traced]
    return Found(tuple(found), tuple(_estimates(untraced, ranked, found[0])), tuple(left_out))


def _counted(what: str, items: Sequence[T], tell: Callable[[str], None]) -> Iterator[T]:
    """The items, each told before it is given: what it is, and which of how many."""
    for number, one in enumerate(items, 1):
        tell(f"{what} {number} of {len(items)}, {one.grid if isinstance(one, Ranked) else one}")
        yield one


def _estimates(untraced: Sequence[Ranked], ranked: Sequence[Ranked], best: Forecast) -> Iterator[Estimate]:
    """The grids that cut features and were not traced, beside the closed form of the best plan's grid."""
    measure = next(one for one in ranked if one.grid == factors(best.plan))
    for one in sorted(untraced, key=lambda one: not one.fits):
        if one.grid.x * one.grid.y > 1:
            yield Estimate(one, one.behind(measure))


def factors(plan: Plan) -> Factors:
    """Sizes of a plan's x, y, z and data."""
    sizes = plan.placement.axes()
    return Factors(*(sizes[axis] for axis in AXES))


def _rank(one: Forecast) -> tuple[bool, float, int]:
    if one.fits:
        return False, one.timing.total, one.peak
    return True, float(one.peak), one.peak


def _promising(ranked: Sequence[Ranked], something_fits: bool) -> list[Ranked]:
    """The grids to trace: those that closed forms hold for about as fast as what cuts no features, or, where nothing
    fits, those that need least."""
    cut = [one for one in ranked if one.grid.x * one.grid.y > 1]
    if not something_fits:
        able = [one for one in cut if one.fits] + [one for one in cut if one.bound.startswith("memory")]
        return able[:MOST_TRACED]
    plain = min((one.seconds for one in ranked if one.grid.x * one.grid.y == 1 and one.fits), default=float("inf"))
    return [one for one in cut if one.fits and one.seconds <= PROMISING * plain][:MOST_TRACED]


def _forecasts(traces: Traces, cluster: Cluster, ranked: Ranked) -> Iterator[Forecast]:
    """A grid as its closed form liked it best; with time cut over y, where that can be; and with all recomputed, if it
    needs too much memory."""
    found = forecast(traces, cluster, plan_of(ranked))
    yield found
    if ranked.grid.x == 1:
        with suppress(ForecastError):
            yield forecast(traces, cluster, plan_of(ranked, "1d-sequence"))
    if found.bound.startswith("memory") and ranked.job.recompute != "full":
        yield forecast(traces, cluster, plan_of(replace(ranked, job=replace(ranked.job, recompute="full"))))


def _in_chunks(traces: Traces, cluster: Cluster, best: Forecast) -> list[Forecast]:
    """The best plan with products whose pieces travel while others are multiplied, the fastest first; where it pays."""
    waits = sum(best.timing.exposed.get(axis, 0.0) for axis in ("x", "y"))
    if not best.fits or not best.plan.placement.grid.cuts_features or not waits:
        return []
    found: list[Forecast] = []
    for chunks in CHUNKS:
        with suppress(ForecastError):
            placement = replace(best.plan.placement, chunks=chunks)
            found.append(forecast(traces, cluster, replace(best.plan, placement=placement)))
    return sorted((one for one in found if one.fits and one.timing.total < WORTH * best.timing.total), key=_rank)


def _squares(likeness: Network, ranked: Sequence[Ranked], something_fits: bool) -> Iterator[tuple[Square, str]]:
    """The grids of 2d, 2.5d and 3d, those that send least first, with why one is not worth a trace."""
    best = ranked[0]
    sends = [(sent(likeness, square, _job_of(square, ranked)), square) for square in squares(best.grid.world)]
    for place, (nbytes, square) in enumerate(sorted(sends, key=lambda one: one[0])):
        about = f"its linears send {in_bytes(nbytes)} a step, and all of {best.grid} {in_bytes(best.bytes)}"
        if something_fits and nbytes > PROMISING * best.bytes:
            yield square, f"not traced: {about}"
        else:
            yield square, "" if place < MOST_SQUARES else f"not traced: others send less; {about}"


def _job_of(square: Square, ranked: Sequence[Ranked]) -> Job:
    """The job of the best grid that cuts rows into as many parts."""
    parts = Plan.of({"placement": square.placement()}).placement.parts
    return next((one.job for one in ranked if one.grid.z * one.grid.data == parts), ranked[0].job)


def _forecasts_of_square(
    traces: Traces, cluster: Cluster, square: Square, ranked: Sequence[Ranked]
) -> Iterator[Forecast]:
    job = _job_of(square, ranked)
    found = forecast(traces, cluster, _plan(square.placement(), job, cut=True))
    yield found
    if found.bound.startswith("memory") and job.recompute != "full":
        yield forecast(traces, cluster, _plan(square.placement(), replace(job, recompute="full"), cut=True))


def plan_of(ranked: Ranked, algorithm: str = "4d") -> Plan:
    """The plan that a closed form weighed; "1d-sequence" only where x is one."""
    grid = ranked.grid
    placement = grid.settings()
    if algorithm == "1d-sequence":
        placement |= {"tensor": {"algorithm": algorithm, "y": grid.y}, "z": grid.z}
    return _plan(placement, ranked.job, cut=grid.z > 1)


def _plan(placement: dict[str, Any], job: Job, *, cut: bool) -> Plan:
    """A job on a placement, which cuts weights over z or does not."""
    precision = next(name for name, size in ITEMSIZES.items() if size == job.itemsize)
    placement = {**placement, "recompute": job.recompute, "precision": precision}
    if cut:
        placement["shard"] = job.shard
    return Plan.of(
        {"placement": placement, "schedule": {"name": "accumulate", "microbatches": job.microbatches}},
    )


def jobs(world: int, rows: int, precisions: Sequence[str]) -> list[Job]:
    """What a grid may choose from: precision, recomputation, micro-batches, and what stays cut over z."""
    return [
        Job(
            rows,
            microbatches=microbatches,
            itemsize=ITEMSIZES[precision],
            gradient=ITEMSIZES[precision],
            recompute=recompute,
            shard=shard,
        )
        for precision in precisions
        for recompute in RECOMPUTE
        for shard in ("parameters", "optimizer")
        for microbatches in _microbatches(1, rows)
    ]


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


def _microbatches(parts: int, rows: int) -> Iterator[int]:
    """One, and its doubles as long as every part still has a row in each."""
    number = 1
    yield number
    while number * 2 * parts <= rows and number * 2 <= MOST_MICROBATCHES:
        number *= 2
        yield number
