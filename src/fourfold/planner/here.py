"""This machine as a cluster: what `fourfold doctor` measured, or a quick probe of the processor."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from fourfold.hardware import Cluster, Device, Link

LOOPBACK = Link("loopback", 0.0, 1e9, each=50e-6)
"""Where doctor has not measured: what a gloo collective of two local processes reaches on a slow machine."""


def cluster_file() -> Path:
    """Where doctor leaves what it measured."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "fourfold" / "cluster.json"


def here(workers: int = 1) -> Cluster:
    """This machine with room for `workers` ranks.

    Processor cores that are fewer than the workers are shared: each worker then has a part of the speed.

    Raises:
        ClusterError: doctor's file is damaged (run `fourfold doctor` again).
    """
    place = cluster_file()
    measured = Cluster.parse(str(place)) if place.is_file() else probe()
    if not measured.is_cpu or workers <= measured.devices_per_node:
        return measured
    part = measured.devices_per_node / workers
    device = measured.device
    slower = dataclasses.replace(
        device,
        memory=int(device.memory * part),
        memory_bandwidth=device.memory_bandwidth * part,
        flops={dtype: peak * part for dtype, peak in device.flops.items()},
    )
    link = dataclasses.replace(measured.intra, each=measured.intra.each / part)
    return dataclasses.replace(measured, devices_per_node=workers, device=slower, intra=link, inter=link)


def loaded() -> tuple[str, ...]:
    """A line where more programs want this machine's cores than there are; nothing where they do not, or on GPUs."""
    cores = psutil.cpu_count(logical=False) or 1
    load = os.getloadavg()[0]  # programs that ran or waited to, the mean of about the last minute
    if load <= cores or torch.cuda.is_available():
        return ()
    found = f"(load {load:.0f} on {cores} core{'s'[: cores > 1]})"
    if cluster_file().is_file():
        return (f"the machine is busy {found}: a step may take longer than forecast",)
    return (f"the machine was busy when it was looked at {found}: times are unreliable",)


def probe() -> Cluster:
    """A tenth of a second of matrix products and copies on one thread; one device a core."""
    cores = psutil.cpu_count(logical=False) or 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = {"fp32": _products(torch.float32), "fp64": _products(torch.float64)}
        bandwidth = _copies()
    finally:
        torch.set_num_threads(threads)
    device = Device(
        name="cpu_probed",
        memory=psutil.virtual_memory().total // cores,
        memory_bandwidth=bandwidth,
        flops=flops,
        link=LOOPBACK.name,
        efficiency=0.85,
        source="probed",
    )
    return Cluster(1, cores, device, LOOPBACK, LOOPBACK)


def _products(dtype: torch.dtype, size: int = 384) -> float:
    """FLOP/s of a square matrix product, the best of a few."""
    a = torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / min(_timed(lambda: a @ a) for _ in range(5))


def _copies(nbytes: int = 32 * 1024**2) -> float:
    """Bytes/s read and written by a copy, the best of a few."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * nbytes / min(_timed(lambda: target.copy_(source)) for _ in range(5))


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
