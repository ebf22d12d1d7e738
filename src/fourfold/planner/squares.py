"""Grids of the algorithms that want them square: 2D on q x q ranks, 2.5D on several such, 3D on q x q x q.

There are few of them for a world size. What their linears send is known in closed form (`placement.tensor.traffic`);
with what their weights send, that says which are worth a trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from fourfold.placement.rows import share
from fourfold.placement.tensor import traffic
from fourfold.placement.tensor.between import Lines, way_of
from fourfold.placement.tensor.traffic import Line, Traffic
from fourfold.plan import Placement, Plan
from fourfold.planner.network import Network
from fourfold.planner.tolls import Job


@dataclass(frozen=True)
class Square:
    """A grid of one of these algorithms.

    Attributes:
        algorithm: "2d", "2.5d" or "3d".
        sizes: its options.
        data: replicas beside those that it brings.
    """

    algorithm: str
    sizes: dict[str, int]
    data: int = 1

    def placement(self) -> dict[str, Any]:
        """What a plan says under `placement`."""
        return {"tensor": {"algorithm": self.algorithm, **self.sizes}, "data": self.data}

    def __str__(self) -> str:
        sizes = [f"{name} {size}" for name, size in self.sizes.items()] + [f"data {self.data}"] * (self.data > 1)
        return f"{self.algorithm} {' '.join(sizes)}"


def squares(world: int) -> Iterator[Square]:
    """All of them. Layers of 2.5D are replicas: whoever leaves some over is 2.5D."""
    for q in takewhile(lambda q: q * q <= world, count(2)):
        layers, rest = divmod(world, q * q)
        if not rest:
            yield Square("2d", {"q": q}) if layers == 1 else Square("2.5d", {"q": q, "d": layers})
        cubes, rest = divmod(world, q**3)
        if cubes and not rest:
            yield Square("3d", {"q": q}, cubes)


def sent(network: Network, square: Square, job: Job) -> int:
    """Bytes that a rank sends in a step for the linears of blocks, about: as if everything were dealt evenly."""
    placement = Plan.of({"placement": square.placement()}).placement
    sizes = placement.axes()
    parts = sizes["z"] * sizes["data"]
    found = 0
    for microbatch in range(job.microbatches):
        tokens = len(share(job.rows, job.microbatches, parts, microbatch, 0)) * network.sequence
        for linear in network.linears:
            lines = Lines(*(Line(axis, sizes[axis]) for axis in (linear.contract, linear.across, "z")))
            outputs = sum(band.features for band in linear.outputs)
            about = tokens, linear.inputs.features, outputs, job.itemsize
            forward, backward = way_of(placement.grid).traffic(lines, *about).sent
            found += forward * (2 if job.recompute == "full" else 1) + backward
    weights = sum(linear.weight for linear in network.linears)
    return network.blocks * (found + sum(_weights(placement, weights, job).sent))


def _weights(placement: Placement, elements: int, job: Job) -> Traffic:
    """What weights and their gradients send in a step: over z where they travel whole, and over replicas."""
    sizes = placement.axes()
    travels = way_of(placement.grid).inside(placement.grid).z == 1
    local, z = elements // (sizes["x"] * sizes["y"]), Line("z", sizes["z"])
    found = traffic.replicas(local // z.size, Line("data", sizes["data"]), itemsize=job.gradient)
    if travels:
        each = traffic.weights(local, z, itemsize=job.itemsize, regather=job.shard == "parameters")
        times = job.microbatches if job.shard == "parameters" else 1
        found += Traffic(each.forward * times, each.backward * times)
    return found
