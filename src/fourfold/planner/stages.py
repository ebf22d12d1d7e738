"""Pipeline stages over a grid, in closed form: 1F1B (Narayanan et al. 2021, arXiv 2104.04473, sections 2.2 and 3).

Each stage is a grid of its own; a step is every stage's micro-batch once, and the slowest stage's for each further one:
with equal stages (m + p - 1) of them, of which p - 1 are bubble. The first stage holds the activations of min(m, p).
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.hardware import Cluster
from fourfold.hardware.collectives import EFFICIENCY, send
from fourfold.hardware.sharing import Counted, Sharing
from fourfold.planner.grids import obstacle, too_much
from fourfold.planner.held import held
from fourfold.planner.network import Network
from fourfold.planner.pace import Pace
from fourfold.planner.tolls import Factors, Job, Tolls


@dataclass(frozen=True)
class Staged:
    """A pipeline's forecast.

    Attributes:
        grid: of one stage.
        seconds: of a step.
        bubble: share of the step in which a stage of average length has nothing to do.
        memory: bytes on a rank of the first stage, by category.
        bound: why it cannot run; empty if it can.
    """

    grid: Factors
    stages: int
    job: Job
    seconds: float
    bubble: float
    memory: dict[str, int]
    bound: str

    @property
    def fits(self) -> bool:
        """Nothing binds."""
        return not self.bound

    def __str__(self) -> str:
        return f"{self.stages} stages of {self.grid}, {self.job.microbatches} micro-batches"


def weigh_stages(
    network: Network, cluster: Cluster, grid: Factors, stages: int, job: Job, sharing: Sharing | None = None
) -> Staged:
    """One pipeline's forecast.

    Args:
        grid: of one stage; the pipeline has stages x grid.world ranks.
        job: `microbatches` is the number m that a stage works on in turn.
    """
    if stages > network.blocks:
        return Staged(grid, stages, job, 0.0, 0.0, {}, f"stages: {stages} for {network.blocks} blocks")
    parts = [Tolls(network.part(blocks, ends=last), grid, job) for blocks, last in _cut(network.blocks, stages)]
    turns, tails = [], []
    for tolls in parts:
        timing = Pace(tolls, cluster, sharing or Counted()).timing()
        tail = timing.update + timing.exposed.get("data", 0.0)
        turns.append((timing.total - tail) / job.microbatches + (_boundary(tolls, cluster) if stages > 1 else 0.0))
        tails.append(tail)
    # the blocks are dealt to the first stages; the last one has the ends. All stages but those two kinds are alike
    counts = _counts(network.blocks, stages)
    once = sum(turn * count for turn, count in zip(turns, counts, strict=True))
    seconds = once + (job.microbatches - 1) * max(turns) + max(tails)
    idle = 1 - job.microbatches * once / stages / (seconds - max(tails))
    memory = held(parts[0], cluster, inflight=min(job.microbatches, stages))
    bound = obstacle(network, grid, job) or too_much(memory, cluster)
    return Staged(grid, stages, job, seconds, idle, memory, bound)


def _cut(blocks: int, stages: int) -> list[tuple[int, bool]]:
    """The kinds of stages, (blocks, holds the ends): the longest, and the last."""
    longest, last = -(-blocks // stages), blocks // stages
    return [(longest, True)] if stages == 1 else [(longest, False), (last, True)]


def _counts(blocks: int, stages: int) -> list[int]:
    """How many stages there are of each kind; shorter ones in between are taken for longest."""
    return [1] if stages == 1 else [stages - 1, 1]


def _boundary(tolls: Tolls, cluster: Cluster) -> float:
    """Seconds of a micro-batch's activations to the next stage and of their gradients back.

    All ranks of a stage send at once, each its part of what its group holds in common (scatter and gather trick).
    """
    tokens, job, grid = max(tolls.tokens), tolls.job, tolls.grid
    nbytes = tokens * tolls.network.hidden * job.itemsize / (grid.x * grid.y)
    inside = 2 * grid.world <= cluster.devices_per_node
    link = cluster.intra if inside else cluster.inter
    sharing = 1 if inside else min(grid.world, cluster.devices_per_node)
    bandwidth = cluster.intra.among(2) if inside else cluster.node_bandwidth / sharing
    return 2 * send(nbytes, link.latency, EFFICIENCY * bandwidth)
