import dataclasses

import pytest

from fourfold.hardware import Cluster, Link
from fourfold.hardware.collectives import (
    EFFICIENCY,
    Group,
    broadcast,
    hierarchical_all_reduce,
    ring_all_reduce,
    ring_pass,
    seconds,
    send,
    tree_all_reduce,
)


def test_closed_forms():
    assert ring_all_reduce(8e9, 4, 1e-3, 1e9) == pytest.approx(6e-3 + 12)
    assert tree_all_reduce(8e9, 4, 1e-3, 1e9) == pytest.approx(4e-3 + 16)
    assert ring_pass(8e9, 4, 1e-3, 1e9) == pytest.approx(3e-3 + 6)
    assert broadcast(8e9, 4, 1e-3, 1e9) == pytest.approx(3e-3 + 8)
    assert send(8e9, 1e-3, 1e9) == pytest.approx(1e-3 + 8)


def test_one_rank_waits_for_nobody():
    assert ring_all_reduce(8e9, 1, 1e-3, 1e9) == tree_all_reduce(8e9, 1, 1e-3, 1e9) == 0
    assert ring_pass(8e9, 1, 1e-3, 1e9) == broadcast(8e9, 1, 1e-3, 1e9) == 0
    assert seconds("all_reduce", 8e9, Cluster.parse("8x h100_sxm"), Group(1, 1, 1)) == 0


def test_all_reduce_is_reduce_scatter_and_all_gather():
    for n in (2, 3, 7, 8):
        assert ring_all_reduce(5e8, n, 1e-5, 1e10) == pytest.approx(2 * ring_pass(5e8, n, 1e-5, 1e10))


@pytest.mark.parametrize(
    ("size", "stride", "per_node", "rivals"),
    [
        (8, 1, 8, 1),  # one node
        (16, 1, 8, 1),  # two nodes, one ring through all
        (2, 8, 1, 8),  # every device has a partner in the other node
        (4, 4, 2, 4),
        (8, 2, 4, 2),
        (3, 1, 3, 1),  # not a power of two
    ],
)
def test_where_a_group_lies(size, stride, per_node, rivals):
    cluster = Cluster.parse("2 nodes of 8x a100_sxm_80gb")
    assert Group.of(cluster, size, stride) == Group(size, per_node, rivals)


def test_groups_share_the_ports_of_a_node():
    """Galvatron's shipped profile (planning.md 0.7): all-reduce bus bandwidth, two nodes of 8 devices, ranks far apart:
    8.1, 16.2 GB/s for groups of 2, 4: a node's ports carry 65 GB/s, divided by the groups that use them at once.
    Groups of 8 (20.8) and the whole (44.7) are bound by more than the ports, so the share is their upper bound.
    """
    cluster = dataclasses.replace(
        Cluster.parse("2 nodes of 8x a100_sxm_80gb"), inter=Link("measured", 0.0, 65e9, shared_by=8)
    )
    assert cluster.node_bandwidth == 65e9
    assert Group.of(cluster, 2, 8).bandwidth(cluster) == pytest.approx(8.1e9, rel=0.01)
    assert Group.of(cluster, 4, 4).bandwidth(cluster) == pytest.approx(16.2e9, rel=0.01)
    assert Group.of(cluster, 8, 2).bandwidth(cluster) >= 20.8e9
    assert Group.of(cluster, 16, 1).bandwidth(cluster) >= 44.7e9


def test_hierarchy_is_three_rings():
    cluster = Cluster.parse("4 nodes of 8x a100_sxm_80gb")
    group = Group.of(cluster, 32, 1)
    inside, outside = EFFICIENCY * 300e9, EFFICIENCY * 200e9 / 8
    expected = 2 * ring_pass(1e9, 8, cluster.intra.latency, inside)
    expected += ring_all_reduce(1e9 / 8, 4, cluster.inter.latency, outside)
    assert hierarchical_all_reduce(1e9, cluster, group) == pytest.approx(expected)


def test_more_ports_are_never_slower_and_small_messages_prefer_a_tree():
    slow, fast = (Cluster.parse(f"4 nodes of 8x h100_sxm over {n}x port_400gb") for n in (1, 8))
    group = Group.of(slow, 32, 1)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        assert seconds(op, 1e9, fast, group) < seconds(op, 1e9, slow, group)
    ring = ring_all_reduce(8, 32, fast.inter.latency, EFFICIENCY * group.bandwidth(fast))
    assert seconds("all_reduce", 8, fast, group) < ring / 2


def test_unknown_op_is_named():
    with pytest.raises(ValueError, match="gossip"):
        seconds("gossip", 1e6, Cluster.parse("8x h100_sxm"), Group(8, 8, 1))
