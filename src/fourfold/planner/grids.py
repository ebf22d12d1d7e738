"""All grids x * y * z * data of a world size, powers of two or not, ranked by closed form, each with its reasons.

    ranked = rank_grids(Network.gpt(12288, 42, 96, vocabulary=51200), cluster, jobs=Job(rows=1024, recompute="full"))
    print(text(ranked))

No model is traced: a grid takes a millisecond, so that thousands can be ranked and the best few be forecast in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log

from fourfold.hardware import Cluster
from fourfold.hardware.sharing import Counted, Sharing
from fourfold.planner.clock import BEST, LIKELY, WORST, Timing
from fourfold.planner.held import held
from fourfold.planner.network import Band, Linear, Network
from fourfold.planner.pace import Pace
from fourfold.planner.shortfall import shortfall
from fourfold.planner.tolls import AXES, Factors, Job, Tolls
from fourfold.planner.units import in_bytes


class GridError(ValueError):
    """A grid that cannot be: says which layer and axis, what was expected and found, and the nearest grids that fit."""


@dataclass(frozen=True)
class Ranked:
    """One grid's forecast, for the rank with the most rows.

    Attributes:
        job: the best of the jobs that were offered.
        sent: bytes that the rank sends in a step, by axis.
        busy: seconds of communication, by axis, hidden or not.
        timing: the step's likely seconds.
        low, high: seconds under the best and the worst assumptions.
        memory: bytes at the highest moment, by category.
        bound: why the grid cannot run; empty if it can.
    """

    grid: Factors
    job: Job
    sent: dict[str, int]
    busy: dict[str, float]
    timing: Timing
    low: float
    high: float
    memory: dict[str, int]
    bound: str = ""

    @property
    def fits(self) -> bool:
        """Nothing binds."""
        return not self.bound

    @property
    def seconds(self) -> float:
        """The step, likely."""
        return self.timing.total

    @property
    def bytes(self) -> int:
        """Sent in a step on all axes."""
        return sum(self.sent.values())

    def behind(self, best: Ranked) -> str:
        """In words, what this grid loses to the best one: its bound, or by how much its step is longer, and where."""
        return self.bound or shortfall(self.timing, best.timing)


def grids(world: int) -> Iterator[Factors]:
    """Every (x, y, z, data) whose product is the world size."""
    for x in _divisors(world):
        for y in _divisors(world // x):
            for z in _divisors(world // (x * y)):
                yield Factors(x, y, z, world // (x * y * z))


def obstacle(network: Network, grid: Factors, job: Job) -> str:
    """Why this network cannot be laid on this grid, in words; empty if it can."""
    sizes = dict(zip(AXES, grid, strict=True))
    for linear in (*network.linears, *((network.vocabulary_linear,) if network.vocabulary else ())):
        for axis, bands in ((linear.contract, (linear.inputs,)), (linear.across, linear.outputs)):
            if reason := _too_narrow(linear, axis, bands, sizes[axis]):
                return reason
    if 0 < network.kv_heads < grid.y and grid.y % network.kv_heads:
        most = network.kv_heads
        return (
            f"heads: {most} key-value heads over y = {grid.y}: expected at most {most} ranks, or a multiple of {most}"
        )
    needed = grid.z * grid.data * job.microbatches
    if job.rows < needed:
        return (
            f"rows: z {grid.z} x data {grid.data} x {job.microbatches} micro-batches need {needed} rows a step, and "
            f"there are {job.rows}: some ranks would compute nothing"
        )
    return ""


def _too_narrow(linear: Linear, axis: str, bands: Sequence[Band], size: int) -> str:
    """Why these features leave some rank with nothing; key-value heads may be fewer, then ranks hold copies."""
    most = max(band.parts for band in bands)
    if most >= size:
        return ""
    what = "heads" if any(band.width > 1 for band in bands) else "features"
    return f"{linear.name}: {most} {what} cannot be cut over {axis} = {size}"


def nearest(network: Network, grid: Factors, job: Job, count: int = 3) -> list[Factors]:
    """Grids of the same world size on which the network can be laid, those most alike first, above all in how they cut
    the batch."""

    def distance(other: Factors) -> tuple[float, float]:
        moved = sum(abs(log(mine / its)) for mine, its in zip(other, grid, strict=True))
        return round(moved, 9), abs(log(other.z * other.data / (grid.z * grid.data)))

    return sorted((other for other in grids(grid.world) if not obstacle(network, other, job)), key=distance)[:count]


def check(network: Network, grid: Factors, job: Job) -> None:
    """Refuse a grid on which the network cannot be laid.

    Raises:
        GridError: with the reason and the nearest grids that fit.
    """
    reason = obstacle(network, grid, job)
    if reason:
        near = "; ".join(map(str, nearest(network, grid, job)))
        raise GridError(f"plan.placement: {grid}: {reason}; {f'try {near}' if near else 'no grid of this size fits'}")


def weigh(network: Network, cluster: Cluster, grid: Factors, job: Job, sharing: Sharing | None = None) -> Ranked:
    """One grid's forecast.

    Raises:
        GridError: more ranks than the machine has devices.
    """
    if grid.world > cluster.world:
        raise GridError(f"plan.placement: {grid} needs {grid.world} devices, and the machine has {cluster.world}")
    tolls = Tolls(network, grid, job)
    paces = {assume: Pace(tolls, cluster, sharing or Counted(), assume) for assume in (LIKELY, BEST, WORST)}
    likely, low, high = (pace.timing() for pace in paces.values())
    memory = held(tolls, cluster)
    bound = obstacle(network, grid, job) or too_much(memory, cluster)
    return Ranked(grid, job, tolls.sent(), paces[LIKELY].busy, likely, low.total, high.total, memory, bound)


def rank_grids(
    network: Network,
    cluster: Cluster,
    world: int | None = None,
    *,
    jobs: Job | Sequence[Job],
    sharing: Sharing | None = None,
    among: Iterable[Factors] | None = None,
) -> list[Ranked]:
    """Every grid of `world` ranks, each with the job that suits it best: those that fit, the fastest first; then the
    others, those nearest to fitting first, with their reasons.

    Args:
        world: ranks; the whole cluster unless said.
        jobs: one, or several of which each grid takes its best (micro-batches, recomputation, what is sharded).
        sharing: the bandwidth model; `Counted` unless said.
        among: consider these grids alone.
    """
    offered = [jobs] if isinstance(jobs, Job) else list(jobs)
    found = []
    for grid in among if among is not None else grids(world or cluster.world):
        distinct = {job: weigh(network, cluster, grid, job, sharing) for job in offered}
        found.append(min(distinct.values(), key=_place))
    return sorted(found, key=_place)


def _place(one: Ranked) -> tuple[int, float, int, Factors]:
    if one.fits:
        return 0, one.seconds, one.bytes, one.grid
    if one.bound.startswith("memory"):
        return 1, float(sum(one.memory.values())), one.bytes, one.grid
    return 2, one.seconds, one.bytes, one.grid


def text(ranked: Sequence[Ranked], shown: int = 10) -> str:
    """A table: bytes by axis, memory and time of the best, and what bound the others."""
    lines = [f"{'grid':<28} {'step':>9} {'waits':>9} {'memory':>11}  {'sent over x, y, z, data':<50} behind the best"]
    for one in ranked[:shown]:
        waits = sum(one.timing.exposed.values())
        sent = ", ".join(in_bytes(one.sent[axis]) for axis in AXES)
        memory = in_bytes(sum(one.memory.values()))
        behind = "" if one is ranked[0] and one.fits else one.behind(ranked[0])
        cells = f"{one.grid!s:<28} {_seconds(one.seconds):>9} {_seconds(waits):>9} {memory:>11}"
        lines.append(f"{cells}  {sent:<50} {behind}".rstrip())
    left = len(ranked) - shown
    return "\n".join([*lines, *([f"and {left} more"] if left > 0 else [])])


def too_much(memory: dict[str, int], cluster: Cluster) -> str:
    """Why so much cannot be held, in words; empty if it can."""
    need, have = sum(memory.values()), cluster.device.memory
    if need <= have:
        return ""
    most = max(memory, key=lambda category: memory[category])
    return f"memory: {in_bytes(need)} of {in_bytes(have)}; most of it is {most}, {in_bytes(memory[most])}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if not number % size]
