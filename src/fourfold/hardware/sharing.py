"""What bandwidth a ring gets when the groups of an axis talk at the same moment. Bytes/s, one direction, effective.

All groups of a mesh axis run the same collective at once, and those that cross nodes share the nodes' ports. Two models
answer by how much. `Published` is the rule of AxoNN's authors (Singh et al. 2023, arXiv 2305.13525; as Plexus codes it,
and as the figures in Megatron-AxoNN's examples/comm_model.py follow it: 80, 40, 20 GB/s). `Counted` counts the ring
edges that leave the busiest node. They agree where the axes fill nodes evenly; where a group straddles nodes (3 ranks
an axis, 4 devices a node) only the count knows.

Ranks fill node after node, x fastest, then y, z, data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import lcm
from typing import Protocol

from fourfold.hardware.cluster import Cluster
from fourfold.hardware.collectives import EFFICIENCY, by_messages, ring_all_reduce, ring_pass


@dataclass(frozen=True)
class Span:
    """A mesh axis as the nodes see it.

    Attributes:
        size: ranks of one group.
        stride: ranks between neighbours of a group: the product of the faster axes.
        world: all ranks.
    """

    size: int
    stride: int
    world: int


class Sharing(Protocol):
    """A bandwidth model."""

    def bandwidth(self, cluster: Cluster, span: Span) -> float:
        """Bytes/s of the slowest ring of this axis while every group of the axis runs one."""
        ...


@dataclass(frozen=True)
class Published:
    """In a node what was measured there; across nodes an even share of `across`.

    The share is 1 / min(devices of a node, product of the inner axes). A group is in a node if it fits there with all
    that lies inside of it.

    Attributes:
        inside: bytes/s measured in a node, by (product of the inner axes, size of the group). What is missing takes the
            nominal figure of the node's links, times what collectives reach of it.
        across: bytes/s measured between nodes for one ring a node; None: the node's ports, nominal, times the same.
    """

    inside: Mapping[tuple[int, int], float] = field(default_factory=dict)
    across: float | None = None

    def bandwidth(self, cluster: Cluster, span: Span) -> float:
        """See `Sharing`."""
        devices = cluster.devices_per_node
        if span.size * span.stride <= devices:
            return self.inside.get((span.stride, span.size)) or EFFICIENCY * cluster.intra.among(span.size)
        across = self.across or EFFICIENCY * cluster.node_bandwidth
        return across / min(devices, span.stride)


@dataclass(frozen=True)
class Counted:
    """A node's ports are shared evenly by the ring edges that leave it; inside, a device has its own link.

    Attributes:
        efficiency: share of the nominal bandwidth that a ring reaches.
    """

    efficiency: float = EFFICIENCY

    def bandwidth(self, cluster: Cluster, span: Span) -> float:
        """See `Sharing`."""
        devices = cluster.devices_per_node
        leaving = edges_leaving(devices, span)
        together = max(1, min(span.size, devices // span.stride))
        inside = cluster.intra.among(together)
        if not leaving:
            return self.efficiency * inside
        share = cluster.node_bandwidth / leaving
        return self.efficiency * (min(share, inside) if together > 1 else share)


@lru_cache(maxsize=4096)
def edges_leaving(devices: int, span: Span) -> int:
    """Ring edges that leave the busiest node while every group of the axis runs its ring, in the order of its ranks."""
    size, stride = span.size, span.stride
    out: dict[int, int] = {}
    for rank in range(min(span.world, lcm(size * stride, devices))):  # from there on it repeats
        following = rank + stride if rank // stride % size < size - 1 else rank - (size - 1) * stride
        if rank // devices != following // devices:
            out[rank // devices] = out.get(rank // devices, 0) + 1
    return max(out.values(), default=0)


def ring_seconds(op: str, nbytes: float, cluster: Cluster, span: Span, sharing: Sharing) -> float:
    """Time of one ring collective of every group of an axis, all at once; between processors, of `wire`'s messages.

    Args:
        op: all_reduce, all_gather, reduce_scatter or all_to_all (which hands over as much).
        nbytes: the whole tensor of one group.

    Raises:
        ValueError: another op.
    """
    forms = {
        "all_reduce": ring_all_reduce,
        "all_gather": ring_pass,
        "reduce_scatter": ring_pass,
        "all_to_all": ring_pass,
    }
    if op not in forms:
        raise ValueError(f"no ring for {op!r}; known: {', '.join(forms)}")
    if span.size == 1 or not nbytes:
        return 0.0
    # a step of a ring is over when its slowest edge is: one edge across nodes is enough
    link = cluster.inter if edges_leaving(cluster.devices_per_node, span) else cluster.intra
    bandwidth = sharing.bandwidth(cluster, span)
    if cluster.is_cpu:
        return link.call + by_messages(op, nbytes, span.size, link, bandwidth)
    return link.call + forms[op](nbytes, span.size, link.latency, bandwidth)
