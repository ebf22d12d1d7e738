import json

import pytest

from fourfold.hardware import Cluster, ClusterError
from fourfold.hardware.catalogue import DEVICES, LINKS


@pytest.mark.parametrize(
    ("words", "nodes", "devices", "name"),
    [
        ("8x rtx4090", 1, 8, "rtx4090"),
        ("8 x rtx4090", 1, 8, "rtx4090"),
        ("rtx4090", 1, 1, "rtx4090"),
        ("4 nodes of 8x h100_sxm", 4, 8, "h100_sxm"),
        ("1 node of 4x v100_sxm2_16gb", 1, 4, "v100_sxm2_16gb"),
    ],
)
def test_words(words, nodes, devices, name):
    cluster = Cluster.parse(words)
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == (nodes, devices, name)
    assert cluster.world == nodes * devices


def test_ports_of_a_node():
    assert Cluster.parse("4 nodes of 8x h100_sxm").node_bandwidth == 8 * 50e9
    assert Cluster.parse("2 nodes of 8x rtx4090").node_bandwidth == 12.5e9
    assert Cluster.parse("2 nodes of 8x mi250x_gcd over 4x port_200gb").node_bandwidth == 4 * 25e9


def test_machines_by_name():
    perlmutter = Cluster.parse("256 nodes of perlmutter")
    assert (perlmutter.world, perlmutter.devices_per_node, perlmutter.node_bandwidth) == (1024, 4, 100e9)
    # without a switch each pair of the four has 100 GB/s: a group of two gets one wire of three
    assert [perlmutter.intra.among(devices) for devices in (2, 3, 4)] == [100e9, 200e9, 300e9]
    frontier = Cluster.parse("frontier")
    assert (frontier.world, frontier.node_bandwidth, frontier.device.name) == (8, 100e9, "mi250x_gcd")
    alps = Cluster.parse("1536 nodes of alps")
    assert alps.world == 6144 and [alps.intra.among(devices) for devices in (2, 4)] == [150e9, 450e9]
    assert Cluster.parse("8x a100_sxm_80gb").intra.among(2) == 300e9  # a switch


@pytest.mark.parametrize("words", ["8x rtx4090", "4 nodes of 8x h100_sxm over 2x port_100gb", "2 nodes of alps"])
def test_round_trip(words, tmp_path):
    cluster = Cluster.parse(words)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(cluster.to_dict()))
    assert Cluster.parse(str(path)) == cluster


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("8x rtx4900", "did you mean 'rtx4090'"),
        ("2 nodes of 8x h100_sxm over port_400", "did you mean 'port_400gb'"),
        ("eight rtx4090", "[N nodes of] [Mx] DEVICE"),
        ("0x rtx4090", "at least 1"),
        ("nowhere.json", "cannot read the file"),
    ],
)
def test_bad_words(words, said):
    with pytest.raises(ClusterError) as error:
        Cluster.parse(words)
    assert said in str(error.value)


def test_unknown_device_lists_the_catalogue():
    with pytest.raises(ClusterError) as error:
        Cluster.parse("8x abacus")
    assert all(name in str(error.value) for name in DEVICES)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("device", "memory"), -1, "hardware.device.memory"),
        (("device", "memory"), 1.5, "whole number"),
        (("device", "flops"), {"fp32": "fast"}, "hardware.device.flops.fp32"),
        (("device", "flops"), {}, "at least one dtype"),
        (("inter", "bandwidth"), float("inf"), "hardware.inter.bandwidth"),
        (("inter", "bandwith"), 1.0, "did you mean 'bandwidth'"),
        (("nodes",), 0, "hardware.nodes"),
        (("intra",), 3, "expected a mapping"),
    ],
)
def test_bad_mapping(path, value, said):
    plain = Cluster.parse("8x rtx4090").to_dict()
    inner = plain
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ClusterError) as error:
        Cluster.parse(plain)
    assert said in str(error.value)


@pytest.mark.parametrize(("text", "suffix"), [("{", ".json"), ("a: [", ".yaml"), ("[1]", ".json")])
def test_bad_file(text, suffix, tmp_path):
    path = tmp_path / f"cluster{suffix}"
    path.write_text(text)
    with pytest.raises(ClusterError):
        Cluster.parse(str(path))


def test_missing_key_is_named():
    plain = Cluster.parse("8x rtx4090").to_dict()
    del plain["inter"]
    with pytest.raises(ClusterError, match=r"hardware\.inter: missing"):
        Cluster.parse(plain)


def test_every_name_of_a_device_resolves():
    for device in DEVICES.values():
        assert device.link in LINKS
        assert device.port is None or device.port in LINKS
        assert Cluster.parse(f"2 nodes of 8x {device.name}").world == 16
