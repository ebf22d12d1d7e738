"""Closed forms of the time that a collective takes. Bytes, seconds; bandwidth in one direction.

`nbytes` is always the whole tensor: what an all-reduce sums, what an all-gather yields, what a reduce-scatter takes.
Rings move (n-1)/n of it in n-1 steps; the forms are those of nccl-tests' PERFORMANCE.md and of Thakur, Rabenseifner
and Gropp (2005).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fourfold.hardware.cluster import Cluster, Link

EFFICIENCY = 0.8
"""Share of a link's nominal bandwidth that collectives reach (NVLink: 77-82 % measured on A100 and H100)."""


def ring_all_reduce(nbytes: float, n: int, latency: float, bandwidth: float) -> float:
    """2(n-1) steps, 2(n-1)/n of the tensor."""
    return 2 * (n - 1) * latency + 2 * (n - 1) / n * nbytes / bandwidth


def tree_all_reduce(nbytes: float, n: int, latency: float, bandwidth: float) -> float:
    """Double binary tree: few steps, a little more traffic than a ring."""
    return 2 * math.log2(n) * latency + 2 * nbytes / bandwidth if n > 1 else 0.0


def ring_pass(nbytes: float, n: int, latency: float, bandwidth: float) -> float:
    """All-gather, reduce-scatter and all-to-all: n-1 steps, (n-1)/n of the tensor."""
    return (n - 1) * latency + (n - 1) / n * nbytes / bandwidth


def broadcast(nbytes: float, n: int, latency: float, bandwidth: float) -> float:
    """Pipelined along a ring."""
    return (n - 1) * latency + nbytes / bandwidth if n > 1 else 0.0


def reduce(nbytes: float, n: int, latency: float, bandwidth: float) -> float:
    """To one rank, which gets the tensor of every other at once: so `wire` does it."""
    return latency + (n - 1) * nbytes / bandwidth if n > 1 else 0.0


def by_messages(op: str, nbytes: float, n: int, link: Link, bandwidth: float) -> float:
    """As `wire` does it between processors: in each round all messages leave at once, and cost the processor time.

    An all-reduce is an exchange and a gather; a broadcast goes down a binomial tree, whole at every edge (gloo's).
    """
    if op == "broadcast":
        return math.ceil(math.log2(n)) * (link.latency + 2 * link.each + nbytes / bandwidth)
    rounds = 2 if op == "all_reduce" else 1
    sent = (n - 1) * nbytes if op == "reduce" else rounds * (n - 1) / n * nbytes
    return rounds * (link.latency + n * link.each) + sent / bandwidth


def send(nbytes: float, latency: float, bandwidth: float) -> float:
    """From one device to another."""
    return latency + nbytes / bandwidth


OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")


@dataclass(frozen=True)
class Group:
    """The ranks of one axis that talk to one another, as the cluster sees them.

    Attributes:
        size: ranks.
        per_node: how many of them lie in one node.
        rivals: groups like this one that use a node's ports at the same moment.
    """

    size: int
    per_node: int
    rivals: int

    @classmethod
    def of(cls, cluster: Cluster, size: int, stride: int) -> Group:
        """The group of an axis of `size` whose neighbours are `stride` ranks apart; ranks fill node after node."""
        devices = cluster.devices_per_node
        per_node = max(1, min(size, devices // stride))
        used = min(devices, size * stride)
        return cls(size, per_node, max(1, used // per_node) if size > per_node else 1)

    @property
    def nodes(self) -> int:
        """Nodes over which the group is spread."""
        return math.ceil(self.size / self.per_node)

    def bandwidth(self, cluster: Cluster) -> float:
        """What one ring through the group gets, nominal: the device's link, or its share of the node's ports."""
        if self.nodes == 1:
            return cluster.intra.among(self.size)
        share = cluster.node_bandwidth / self.rivals
        return share if self.per_node == 1 else min(share, cluster.intra.bandwidth)


def seconds(op: str, nbytes: float, cluster: Cluster, group: Group) -> float:
    """Time of one collective over a group.

    Between processors that of `wire`'s messages; else of an all-reduce the best of ring, tree and, across nodes, the
    hierarchical form.

    Args:
        op: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or reduce.

    Raises:
        ValueError: another op.
    """
    if group.size == 1 or nbytes == 0:
        return 0.0
    link = cluster.inter if group.nodes > 1 else cluster.intra
    bandwidth = EFFICIENCY * group.bandwidth(cluster)
    if op not in OPS:
        raise ValueError(f"no closed form for {op!r}; known: {', '.join(OPS)}")
    if cluster.is_cpu:
        return link.call + by_messages(op, nbytes, group.size, link, bandwidth)
    return link.call + _by_devices(op, nbytes, cluster, group, link.latency, bandwidth)


def _by_devices(op: str, nbytes: float, cluster: Cluster, group: Group, latency: float, bandwidth: float) -> float:
    if op == "all_reduce":
        forms = [
            ring_all_reduce(nbytes, group.size, latency, bandwidth),
            tree_all_reduce(nbytes, group.size, latency, 0.92 * bandwidth),  # NCCL caps a tree at 0.92 of a ring
        ]
        if group.nodes > 1 and group.per_node > 1:
            forms.append(hierarchical_all_reduce(nbytes, cluster, group))
        return min(forms)
    form = {"broadcast": broadcast, "reduce": reduce}.get(op, ring_pass)
    return form(nbytes, group.size, latency, bandwidth)


def hierarchical_all_reduce(nbytes: float, cluster: Cluster, group: Group) -> float:
    """Reduce-scatter in the node, all-reduce of each slice between nodes, all-gather in the node.

    The `per_node` slices of a group cross at once, so that together they have the group's share of the ports.
    """
    inside, outside = group.per_node, group.nodes
    share = EFFICIENCY * cluster.node_bandwidth / group.rivals
    near = ring_pass(nbytes, inside, cluster.intra.latency, EFFICIENCY * cluster.intra.bandwidth)
    return 2 * near + ring_all_reduce(nbytes / inside, outside, cluster.inter.latency, share / inside)
