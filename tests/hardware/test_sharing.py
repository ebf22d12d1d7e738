"""Bandwidth of concurrent rings: the published rule, the count of shared links, and messages one by one, the oracle."""

import dataclasses

import pytest

from fourfold.hardware import Cluster, Link
from fourfold.hardware.catalogue import PUBLISHED
from fourfold.hardware.collectives import Group
from fourfold.hardware.flows import ring_time
from fourfold.hardware.sharing import Counted, Published, Span, edges_leaving, ring_seconds

PERLMUTTER = Cluster.parse("256 nodes of perlmutter")
FRONTIER = Cluster.parse("512 nodes of frontier")


def powers(world):
    """Spans of all axes of all grids of `world`, a power of two."""
    exponent = world.bit_length() - 1
    return [
        Span(2**size, 2**stride, world) for stride in range(exponent + 1) for size in range(1, exponent - stride + 1)
    ]


def crossing(cluster, spans):
    return [span for span in spans if span.size * span.stride > cluster.devices_per_node]


@pytest.mark.parametrize(("inner", "gbs"), [(1, 80), (2, 40), (4, 20), (8, 20), (64, 20)])
def test_perlmutter_across_nodes_as_its_users_measured(inner, gbs):
    # Megatron-AxoNN examples/comm_model.py 8a4ae241: 80, 40, 20 GB/s; the count says the same from nominal ports alone
    span = Span(8, inner, 1024)
    assert PUBLISHED["perlmutter"].bandwidth(PERLMUTTER, span) == gbs * 1e9
    assert Counted().bandwidth(PERLMUTTER, span) == pytest.approx(gbs * 1e9, rel=1e-12)


@pytest.mark.parametrize(("inner", "gbs"), [(1, 40), (2, 20), (4, 10), (8, 5), (16, 5)])
def test_frontier_across_nodes_as_its_users_measured(inner, gbs):
    assert PUBLISHED["frontier"].bandwidth(FRONTIER, Span(16, inner, 4096)) == gbs * 1e9


def test_inside_a_node_the_measured_figure():
    rule = PUBLISHED["perlmutter"]
    assert rule.bandwidth(PERLMUTTER, Span(4, 1, 1024)) == 225e9
    assert rule.bandwidth(PERLMUTTER, Span(2, 2, 1024)) == 76e9
    # not measured: nominal 300 GB/s of four links to each of three peers, times 0.8
    assert Published().bandwidth(PERLMUTTER, Span(4, 1, 1024)) == pytest.approx(240e9)
    assert Published().bandwidth(PERLMUTTER, Span(2, 1, 1024)) == pytest.approx(80e9)


@pytest.mark.parametrize("machine", [PERLMUTTER, FRONTIER, Cluster.parse("8 nodes of 8x h100_sxm over 2x port_400gb")])
def test_rule_and_count_agree_where_axes_fill_nodes(machine):
    slow_ports = dataclasses.replace(machine, intra=Link("fast", 1e-6, 1e15))
    for span in powers(256):
        one, other = (model.bandwidth(slow_ports, span) for model in (Published(), Counted()))
        assert one == pytest.approx(other, rel=1e-12), span


def test_count_is_that_of_groups_in_aligned_cases():
    for span in crossing(FRONTIER, powers(64)):
        assert edges_leaving(8, span) == Group.of(FRONTIER, span.size, span.stride).rivals


@pytest.mark.parametrize(
    ("devices", "span", "edges"),
    [
        (4, Span(3, 1, 12), 2),  # |0 1 2 3|4 5 6 7|8..: node 1 ends one ring of three and begins another
        (4, Span(3, 1, 3), 0),
        (4, Span(2, 3, 6), 2),  # 0-3 stays; 1-4 and 2-5 cross there and back: two edges out of node 0, two of node 1
        (4, Span(4, 3, 12), 3),
        (8, Span(6, 1, 6), 0),
        (1, Span(5, 2, 10), 1),
    ],
)
def test_edges_by_hand(devices, span, edges):
    assert edges_leaving(devices, span) == edges


def test_slower_axes_never_have_more():
    slow_ports = dataclasses.replace(PERLMUTTER, intra=Link("fast", 1e-6, 1e15))
    for model in (Published(), Counted(), PUBLISHED["perlmutter"]):
        for size in (2, 4, 8):
            found = [
                model.bandwidth(slow_ports, Span(size, stride, 64))
                for stride in (1, 2, 4, 8)
                if size * stride > PERLMUTTER.devices_per_node
            ]
            assert found == sorted(found, reverse=True)


def factor_pairs(world):
    return [
        (size, stride) for stride in range(1, world + 1) for size in range(2, world + 1) if not world % (size * stride)
    ]


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("world", [6, 8, 12, 24])
def test_more_sharing_never_increases_bandwidth(devices, world):
    machine = Cluster.parse(f"{-(-world // devices)} nodes of {devices}x h100_sxm over 1x port_100gb")
    for model in (Published(), Counted()):
        for size, stride in factor_pairs(world):
            if size * stride <= devices:
                continue
            here = model.bandwidth(machine, Span(size, stride, world))
            assert here <= model.bandwidth(machine, Span(size * stride, 1, world)) * (1 + 1e-12)
            faster = dataclasses.replace(machine, inter=dataclasses.replace(machine.inter, bandwidth=25e9))
            assert model.bandwidth(faster, Span(size, stride, world)) >= here
            smaller = dataclasses.replace(machine, inter=dataclasses.replace(machine.inter, shared_by=2 * devices))
            assert model.bandwidth(smaller, Span(size, stride, world)) <= here


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_time_grows_with_bytes_and_steps_pay_their_latency(op):
    span, rounds = Span(8, 2, 64), 2 if op == "all_reduce" else 1
    times = [ring_seconds(op, nbytes, PERLMUTTER, span, Counted()) for nbytes in (0, 1e3, 1e6, 1e9)]
    assert times == sorted(times) and times[0] == 0
    assert times[1] > rounds * 7 * PERLMUTTER.inter.latency
    assert ring_seconds(op, 1e6, PERLMUTTER, Span(1, 1, 64), Counted()) == 0


def test_a_ring_is_known_or_refused():
    with pytest.raises(ValueError, match="gossip"):
        ring_seconds("gossip", 1e6, PERLMUTTER, Span(8, 1, 8), Counted())


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("world", [8, 12])
def test_the_count_is_what_messages_take_one_by_one(devices, world):
    """Where every ring has the same share, closed form and messages agree; elsewhere the slowest ring is the bound."""
    machine = Cluster.parse(f"{-(-world // devices)} nodes of {devices}x h100_sxm over 1x port_200gb")
    for size, stride in factor_pairs(world):
        span = Span(size, stride, world)
        exact = ring_time("all_reduce", 64e6, machine, span)
        closed = ring_seconds("all_reduce", 64e6, machine, span, Counted())
        even = not world % devices and (not devices % (size * stride) or not (size * stride) % devices)
        even = even and (not devices % stride or not stride % devices)
        assert closed >= exact * (1 - 1e-9), span
        if even:
            assert closed == pytest.approx(exact, rel=1e-9), span
