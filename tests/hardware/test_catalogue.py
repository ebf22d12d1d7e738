"""Wrong numbers that public catalogues ship, each a test of ours (facts: planning.md 3.4 and 3.5)."""

import pytest

from fourfold.hardware.catalogue import DEVICES, LINKS
from fourfold.hardware.cluster import GIB


def memory_gb(name):
    return DEVICES[name].memory / GIB


def peak(name):
    return DEVICES[name].flops["bf16"] / 1e12


def bandwidth(name):
    return LINKS[DEVICES[name].link].bandwidth / 1e9


def test_a10_has_24_gb_not_28():
    assert memory_gb("a10") == 24


def test_v100_16_gb_is_not_32():
    assert memory_gb("v100_sxm2_16gb") == 16
    assert memory_gb("v100_sxm2_32gb") == 32


def test_v100_has_no_bf16_units_but_fp16_ones():
    assert "bf16" not in DEVICES["v100_sxm2_16gb"].flops
    assert DEVICES["v100_sxm2_16gb"].peak("bf16") == 125e12


def test_a100_pcie_has_no_nvlink_without_a_bridge():
    assert bandwidth("a100_pcie_80gb") == 31.5


def test_l4_memory_is_not_as_fast_as_an_h100s():
    assert DEVICES["l4"].memory_bandwidth == 300e9


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("a100_sxm_80gb", 312),
        ("h100_sxm", 989),
        ("h100_pcie", 756),
        ("h200_sxm", 989),
        ("b200", 2250),
        ("mi300x", 1307),
    ],
)
def test_peaks_are_dense(name, dense):
    assert peak(name) == dense


def test_gaudi_3_and_h100_are_both_dense():
    assert peak("gaudi3") == 1835
    assert peak("h100_sxm") < 1000


def test_mi250x_is_one_die_of_two():
    assert memory_gb("mi250x_gcd") == 64
    assert peak("mi250x_gcd") == 191.5
    assert DEVICES["mi250x_gcd"].memory_bandwidth == 1638e9


def test_mi210_goes_by_its_own_name():
    assert peak("mi210") == 181
    assert "mi210x" not in DEVICES


@pytest.mark.parametrize(
    ("name", "one_way"),
    [
        ("v100_sxm2_32gb", 150),
        ("a100_sxm_80gb", 300),
        ("h100_sxm", 450),
        ("b200", 900),
        ("gaudi2", 300),
        ("gaudi3", 600),
        ("rtx3090", 31.5),
        ("rtx4090", 31.5),
    ],
)
def test_links_are_per_direction(name, one_way):
    assert bandwidth(name) == one_way


def test_ports_are_in_bytes_per_device_never_a_nodes_sum():
    for name in ("a100_sxm_80gb", "h100_sxm"):
        port = DEVICES[name].port
        assert port is not None and LINKS[port].bandwidth <= 50e9
    assert LINKS["port_400gb"].bandwidth == 400e9 / 8


def test_consumer_peaks_are_with_fp32_accumulation():
    assert peak("rtx3090") == 71
    assert peak("rtx4090") == 165


def test_what_is_recalled_is_flagged_and_the_rest_has_a_source():
    for device in DEVICES.values():
        assert device.source or {"memory", "memory_bandwidth", "flops.bf16"} <= set(device.recalled), device.name
    assert "memory" in DEVICES["rtx4090"].recalled
    assert "memory" not in DEVICES["a100_sxm_80gb"].recalled
