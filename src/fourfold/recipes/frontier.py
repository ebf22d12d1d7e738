"""The Frontier recipe: tensor ranks in a node, stages across, replicas outside, and knobs found by a search.

The search runs over tensor ranks, stages, rows of a micro-batch, accumulation steps and whether optimizer states are
sharded (ZeRO-1), where out of memory is a failure. The grid is simulated: what a point costs comes from closed forms,
on the catalogue's Frontier. Of all points, tensor ranks across nodes among them, the best is one of the recipe's shape.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from math import log2

from fourfold.hardware import Cluster
from fourfold.planner.formulas import flops
from fourfold.planner.network import Network
from fourfold.planner.stages import Staged, weigh_stages
from fourfold.planner.tolls import Factors, Job
from fourfold.planner.tuner import Tuned, tune
from fourfold.recipes._claim import Claim

Search = Callable[[list[tuple[float, ...]], Callable[[int], float | None], int, int], Tuned]

MODELS = {
    "22B": (Network.gpt(6144, 48, 48, vocabulary=51200), "16 nodes of frontier"),
    "175B": (Network.gpt(12288, 96, 96, vocabulary=51200), "128 nodes of frontier"),
}
"""Shapes of GPT models of these sizes; the paper's own tables could not be read, so its exact runs are not these."""

KNOBS = tuple(product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (1, 2, 4, 8), (4, 8, 16, 32, 64), (False, True)))
"""Tensor ranks, stages, rows of a micro-batch, accumulation steps, sharded optimizer states."""

SHARE, SEEDS, NEAR = 0.25, 6, 1.05
STAGES = (2, 4, 8, 16)
STEPS = (4, 8, 16, 32, 64)


def claim() -> Claim:
    """Dash et al. 2023: the search, and its observation that accumulation shrinks the bubble."""
    predicted = {_near(name): float(SEEDS) for name in MODELS}
    predicted |= {f"evaluations ÷ all, {name}": SHARE for name in MODELS}
    predicted |= {figure: 1.0 for name in MODELS for figure in (_inside(name), _enough(name))}
    predicted |= {_falls(stages): float(len(STEPS) - 1) for stages in STAGES}
    return Claim(
        system="distributed training on Frontier",
        paper="Dash et al. 2023, arXiv 2312.12705",
        statement="a search reaches within 5 % of the exhaustive best with a quarter of the evaluations (simulated "
        "grid); the best point has its tensor ranks in a node, and at least as many micro-batches as stages; the "
        "bubble's share falls as micro-batches rise at fixed stages",
        predicted=predicted,
        measure=lambda: _figures(tune, STEPS),
        control=lambda: _figures(_drawn, STEPS[:1] * len(STEPS)),
        off="points drawn at random; no accumulation beyond the first figure",
        beside=_beside,
    )


def _near(name: str) -> str:
    return f"of {SEEDS} searches within 5 % of the best, {name}"


def _inside(name: str) -> str:
    return f"tensor ranks of the best lie in a node, {name}"


def _enough(name: str) -> str:
    return f"micro-batches of the best are as many as stages, {name}"


def _falls(stages: int) -> str:
    return f"doublings of micro-batches that shrink the bubble, {stages} stages"


def _figures(search: Search, steps: tuple[int, ...]) -> dict[str, float]:
    figures: dict[str, float] = {}
    points = [(*map(log2, sizes), float(sharded)) for *sizes, sharded in KNOBS]
    for name in MODELS:
        costs = _costs(name)
        best = min(cost for cost in costs if cost is not None)
        budget = int(SHARE * len(KNOBS))
        found = [search(points, costs.__getitem__, budget, seed) for seed in range(SEEDS)]
        figures[_near(name)] = float(sum(one.cost <= NEAR * best for one in found))
        figures[f"evaluations ÷ all, {name}"] = max(len(set(one.tried)) for one in found) / len(KNOBS)
        tensor, stages, _, number, _ = KNOBS[min(found, key=lambda one: one.cost).best]
        figures[_inside(name)] = float(tensor <= Cluster.parse(MODELS[name][1]).devices_per_node)
        figures[_enough(name)] = float(number >= stages)
    for stages in STAGES:
        bubbles = [_weigh("175B", (4, stages, 1, number, True)).bubble for number in steps]
        figures[_falls(stages)] = float(sum(later < earlier for earlier, later in pairwise(bubbles)))
    return figures


def _drawn(points: list[tuple[float, ...]], cost: Callable[[int], float | None], budget: int, seed: int) -> Tuned:
    """The search with its mechanism off: it learns nothing from what it tried."""
    tried = random.Random(seed).sample(range(len(points)), budget)
    costs = {index: value for index in tried if (value := cost(index)) is not None}
    best = min(costs, key=lambda index: costs[index])
    return Tuned(best, costs[best], tuple(tried))


@cache
def _costs(name: str) -> tuple[float | None, ...]:
    """Seconds a row, of every point; None where it cannot run, for want of memory or of ranks."""
    world = Cluster.parse(MODELS[name][1]).world
    weighed = (_weigh(name, knobs) if knobs[0] * knobs[1] <= world else None for knobs in KNOBS)
    return tuple(one.seconds / one.job.rows if one is not None and one.fits else None for one in weighed)


def _weigh(name: str, knobs: tuple[int, int, int, int, bool]) -> Staged:
    network, machine = MODELS[name]
    cluster = Cluster.parse(machine)
    tensor, stages, each, steps, sharded = knobs
    replicas = cluster.world // (tensor * stages)
    grid = Factors(1, tensor, replicas) if sharded else Factors(1, tensor, 1, replicas)
    shard = "optimizer" if sharded else "parameters"
    job = Job(rows=each * steps * replicas, microbatches=steps, recompute="full", shard=shard)
    return weigh_stages(network, cluster, grid, stages, job)


def _beside() -> dict[str, tuple[float, float]]:
    """Share of the peak: the paper's, and that of the best point here, recomputation counted."""
    found = {}
    for name, published in {"22B": 38.38, "175B": 36.14}.items():
        network, machine = MODELS[name]
        cluster = Cluster.parse(machine)
        row = flops(network.sequence, 1, network.hidden, network.blocks, network.vocabulary, recompute="full")
        best = min(cost for cost in _costs(name) if cost is not None)
        found[f"% of peak, {name}"] = published, 100 * row / best / (cluster.world * cluster.device.peak("bf16"))
    return found
