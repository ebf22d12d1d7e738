"""Devices and links by name. Every number has its source beside it; what nobody has checked is named in `recalled`.

The rules that public catalogues break (and that the tests hold): dense peaks, never the doubled figure for sparsity;
one die of a two-die card is one device; bandwidth in one direction, per device, never a node's sum; a bridge that is
sold apart is not a link that every card has.

Sources, as named below: "llm-analysis" is cli99/llm-analysis d841e40, its GPU files; "device_info" is PyTorch 2.13's
torch/utils/_device_info tables; "comm_analysis" is torch/_inductor/comm_analysis.py of 2.13, which mirrors NCCL's
tuner; "sheet" is the vendor's public data sheet; "NERSC", "OLCF" and "CSCS" are those centres' public pages on
Perlmutter, Frontier and Alps; "comm_model" is examples/comm_model.py of axonn-ai/Megatron-AxoNN 8a4ae241.
"""

from __future__ import annotations

import dataclasses

from fourfold.hardware.cluster import GIB, Cluster, Device, Link
from fourfold.hardware.sharing import Published

TF = 1e12
GB = 1e9
US = 1e-6

_NVLINK_HOP = 3.4 * US  # comm_analysis: ring, protocol Simple
_PCIE_HOP = 5.7 * US  # comm_analysis: ring, protocol Simple
_NET_HOP = 14.0 * US  # comm_analysis: ring, protocol Simple
_START = 8.4 * US  # comm_analysis: base latency, ring and tree, protocol Simple; taken for devices without NCCL, too

_LINKS = (
    Link("nvlink2", _NVLINK_HOP, 150 * GB),  # V100: 6 links x 25 GB/s per direction, sheet
    Link("nvlink3", _NVLINK_HOP, 300 * GB),  # A100: 12 x 25, sheet (printed as 600 for both directions)
    Link("nvlink4", _NVLINK_HOP, 450 * GB),  # H100, H200: 18 x 25, sheet (printed as 900 for both directions)
    Link("nvlink3_mesh", _NVLINK_HOP, 300 * GB, wires=3),  # four A100 without a switch: 4 links of 25 to each of three
    Link("nvlink4_mesh", _NVLINK_HOP, 450 * GB, wires=3),  # four GH200 without a switch: 6 links of 25 to each of three
    Link("nvlink5", _NVLINK_HOP, 900 * GB),  # B200: 18 x 50, sheet (printed as 1800 for both directions)
    Link("pcie3", _PCIE_HOP, 15.75 * GB),  # x16: 8 GT/s x 16 lanes x 128/130 / 8
    Link("pcie4", _PCIE_HOP, 31.5 * GB),  # x16: 16 GT/s
    Link("pcie5", _PCIE_HOP, 63.0 * GB),  # x16: 32 GT/s (about 56 measured)
    Link(
        "infinity_gcd", _NVLINK_HOP, 50 * GB
    ),  # MI250X: GCDs of different cards, OLCF Frontier guide (200 in one card)
    Link("infinity_mi210", _NVLINK_HOP, 150 * GB),  # MI210: three links x 50, sheet
    Link("infinity_mi300x", _NVLINK_HOP, 448 * GB),  # MI300X: 7 peers x 64, aggregate of a device, device_info
    Link("gaudi2_ports", _NET_HOP, 300 * GB),  # 24 ports x 100 Gb, Intel
    Link("gaudi3_ports", _NET_HOP, 600 * GB),  # 24 ports x 200 Gb, Intel
    Link("port_25gb", _NET_HOP, 3.1 * GB),  # network ports are sold in bits: 25 Gb/s = 3.1 GB/s
    Link("port_100gb", _NET_HOP, 12.5 * GB),
    Link("port_200gb", _NET_HOP, 25.0 * GB),
    Link("port_400gb", _NET_HOP, 50.0 * GB),
    Link("port_800gb", _NET_HOP, 100.0 * GB),
)
LINKS: dict[str, Link] = {link.name: dataclasses.replace(link, call=_START) for link in _LINKS}

_RESERVED = 1 * GIB  # driver context 0.3-1 GB, plus library workspaces and communication buffers: an allowance


def _gpu(
    name: str,
    gib: float,
    memory_gbs: float,
    bf16: float | None,
    fp32: float,
    link: str,
    port: str | None,
    source: str,
    *,
    fp16: float | None = None,
    fp64: float | None = None,
    recalled: tuple[str, ...] = (),
    efficiency: float = 0.6,
) -> Device:
    """One row: GiB, GB/s, dense TFLOP/s."""
    peaks = {"fp32": fp32, "bf16": bf16, "fp16": fp16 if fp16 is not None else bf16, "fp64": fp64}
    flops = {dtype: peak * TF for dtype, peak in peaks.items() if peak is not None}
    # fp32 and fp64 vector peaks come from memory of the vendors' sheets in every row
    recalled = (*recalled, *(f"flops.{dtype}" for dtype in ("fp32", "fp64") if dtype in flops))
    return Device(name, round(gib * GIB), memory_gbs * GB, flops, link, port, efficiency, _RESERVED, recalled, source)


_SOLD_IN_GB = 1e9 / GIB  # for memories that are sold in decimal gigabytes

_DEVICES = (
    # ---- NVIDIA, data centre. Ports: comm_analysis gives a NIC of 12, 25, 50, 50 GB/s to V100, A100, H100, B200
    _gpu("v100_sxm2_16gb", 16, 900, None, 15.7, "nvlink2", "port_100gb", "llm-analysis; sheet", fp16=125, fp64=7.8),
    _gpu("v100_sxm2_32gb", 32, 900, None, 15.7, "nvlink2", "port_100gb", "llm-analysis; sheet", fp16=125, fp64=7.8),
    # a GEMM of the A100 reaches 65-73 % of 312 in Galvatron's shipped Llama-7B profile
    _gpu("a100_sxm_40gb", 40, 1555, 312, 19.5, "nvlink3", "port_200gb", "device_info", fp64=9.7, efficiency=0.65),
    _gpu("a100_sxm_80gb", 80, 2039, 312, 19.5, "nvlink3", "port_200gb", "device_info", fp64=9.7, efficiency=0.65),
    # 300 GB/s between pairs only with a bridge that is sold apart: PCIe is what every card has
    _gpu("a100_pcie_80gb", 80, 1935, 312, 19.5, "pcie4", None, "llm-analysis; sheet", fp64=9.7, efficiency=0.65),
    _gpu(
        "h100_sxm",
        80,
        3350,
        989,
        67,
        "nvlink4",
        "port_400gb",
        "device_info (its factor for sparsity taken off)",
        fp64=34,
    ),
    _gpu("h100_pcie", 80, 2000, 756, 51, "pcie5", None, "llm-analysis; sheet", fp64=26),
    # the H100 of a GH200 module with 96 GB, as in Alps
    _gpu("gh200_96gb", 96, 4000, 989, 67, "nvlink4", "port_200gb", "sheet", fp64=34, recalled=("memory_bandwidth",)),
    _gpu("h200_sxm", 141 * _SOLD_IN_GB, 4800, 989, 67, "nvlink4", "port_400gb", "vendor's public page", fp64=34),
    _gpu("b200", 180 * _SOLD_IN_GB, 8000, 2250, 75, "nvlink5", "port_400gb", "vendor's public page", fp64=37),
    _gpu("a10", 24, 600, 125, 31.2, "pcie4", None, "llm-analysis, its 28 GB corrected to the sheet's 24"),
    _gpu(
        "l4", 24, 300, 121, 30.3, "pcie4", None, "", recalled=("memory", "memory_bandwidth", "flops.bf16", "flops.fp16")
    ),
    _gpu(
        "l40s",
        48,
        864,
        362,
        91.6,
        "pcie4",
        None,
        "",
        recalled=("memory", "memory_bandwidth", "flops.bf16", "flops.fp16"),
    ),
    # ---- NVIDIA, consumer: bf16 with fp32 accumulation (fp16 accumulation would double it); no NVLink on the 4090, and
    # its driver blocks peer-to-peer copies, so that traffic goes through the host over PCIe
    _gpu(
        "rtx3090",
        24,
        936,
        71,
        35.6,
        "pcie4",
        None,
        "",
        recalled=("memory", "memory_bandwidth", "flops.bf16", "flops.fp16"),
    ),
    _gpu(
        "rtx4090",
        24,
        1008,
        165,
        82.6,
        "pcie4",
        None,
        "",
        recalled=("memory", "memory_bandwidth", "flops.bf16", "flops.fp16"),
    ),
    # ---- AMD. One MI250X card is two devices (GCDs); a Frontier node has 8 GCDs and 4 ports of 25 GB/s
    _gpu("mi250x_gcd", 64, 1638, 191.5, 23.9, "infinity_gcd", None, "OLCF Frontier guide; sheet halved", fp64=23.9),
    _gpu("mi210", 64, 1638, 181, 22.6, "infinity_mi210", None, "device_info (its MI210X)", fp64=22.6),
    _gpu("mi300x", 192, 5300, 1307, 163.4, "infinity_mi300x", "port_400gb", "device_info", fp64=81.7),
    # ---- Intel: all traffic goes over the ports of the card itself
    _gpu("gaudi2", 96, 2460, 432, 11, "gaudi2_ports", None, "Intel's public page"),
    _gpu("gaudi3", 128, 3670, 1835, 14.3, "gaudi3_ports", None, "Intel's public page (dense)"),
)
DEVICES: dict[str, Device] = {device.name: device for device in _DEVICES}


def _machine(devices: int, device: str, intra: str, ports: int, port: str) -> Cluster:
    """One node of a machine."""
    inter = dataclasses.replace(LINKS[port], shared_by=devices / ports)
    return Cluster(1, devices, DEVICES[device], LINKS[intra], inter)


MACHINES: dict[str, Cluster] = {
    "perlmutter": _machine(4, "a100_sxm_40gb", "nvlink3_mesh", 4, "port_200gb"),  # 1536 such nodes, NERSC
    "perlmutter_80gb": _machine(4, "a100_sxm_80gb", "nvlink3_mesh", 4, "port_200gb"),  # 256 such nodes, NERSC
    "frontier": _machine(8, "mi250x_gcd", "infinity_gcd", 4, "port_200gb"),  # 4 cards of two dies, 4 NICs, OLCF
    "alps": _machine(4, "gh200_96gb", "nvlink4_mesh", 4, "port_200gb"),  # 2688 such nodes, a NIC a module, CSCS
}
"""Nodes of machines by name. A Slingshot 11 NIC carries 200 Gb/s."""

PUBLISHED: dict[str, Published] = {
    "perlmutter": Published({(1, 2): 76 * GB, (1, 4): 225 * GB, (2, 2): 76 * GB}, 80 * GB),
    "frontier": Published(
        {
            (1, 2): 129 * GB,
            (1, 4): 52 * GB,
            (1, 8): 135 * GB,
            (2, 2): 50 * GB,
            (2, 4): 72 * GB,
            (4, 2): 36 * GB,
        },
        40 * GB,  # its note on what was measured: 34 (everything inside one rank), 20.6, 10.2 as inner groups double
    ),
}
"""What AxoNN's authors measured of all-reduces on these machines, comm_model: bytes/s of a ring."""
