"""Look at this machine: does a parallel run work here, how fast can it be, what is wrong and what to do."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fourfold.hardware import Cluster, Device, Link
from fourfold.hardware.collectives import EFFICIENCY
from fourfold.planner.here import cluster_file
from fourfold.verify import environment, link, peaks
from fourfold.verify.diagnosis import Diagnosis, Finding

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
GB = 1e9


def doctor(write: bool = True, probe: Callable[[], link.LinkReading] = link.measure) -> Diagnosis:
    """Examine this machine, about ten seconds.

    Args:
        write: keep the measured machine in `cluster_file()`.
        probe: measures the link between two processes.
    """
    place = cluster_file()
    findings = [*environment.versions(), *_devices(), *environment.limits(), *environment.space(place.parent)]
    findings += environment.leftovers()
    rates, spoken = _rates()
    findings += spoken
    try:
        reading = probe()
    except link.LinkError as error:
        advice = "is loopback up, and may this user open sockets on it? Workers on this machine cannot train together"
        return Diagnosis((*findings, Finding("two processes", "wrong", str(error), advice)), {})
    found = (
        f"all-reduce over gloo: {reading.latency * 1e6:.0f} us a message, {reading.bandwidth / GB:.2f} GB/s "
        f"a direction, {reading.seconds:.1f} s with the start"
    )
    findings.append(Finding("two processes", "good", found))
    cluster = _cluster(rates, reading)
    written = ""
    if write:
        kept = _keep(place, cluster)
        findings.append(kept)
        written = str(place) if kept.level == "good" else ""
    return Diagnosis(tuple(findings), cluster.to_dict(), written)


def _devices() -> Iterator[Finding]:
    flags = _processor().get("flags", "").split()
    units = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    name = _processor().get("model name", platform.processor() or platform.machine())
    yield Finding(
        "processor", "good", f"{name}, {environment.cores()} cores, {' '.join(units) or 'no known vector units'}"
    )
    if not torch.cuda.is_available():
        yield Finding("accelerators", "good", "none; runs use the processor")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found = f"{facts.name}, {free / environment.GIB:.1f} GiB free of {total / environment.GIB:.1f}"
        full = free < total / 2
        advice = "another process uses this device: nvidia-smi names it" if full else ""
        yield Finding(f"cuda:{index}", "warning" if full else "good", found, advice)


def _processor() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    entry = path.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.split(":", 1) for line in entry.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _rates() -> tuple[dict[str, float], list[Finding]]:
    """Peaks of one thread by dtype, and of a copy with all threads ("copy"), with how they read."""
    threads = environment.cores()
    one = {name: peaks.gemm(dtype, 1) for name, dtype in DTYPES.items()}
    every = {name: peaks.gemm(dtype, threads) for name, dtype in DTYPES.items()}
    findings = []
    for name in DTYPES:
        found = f"{one[name] / GB:.1f} GFLOP/s on one thread, {every[name] / GB:.1f} on {threads}"
        slow = name == "bf16" and one["bf16"] < one["fp32"] / 4
        remark = "; no bf16 units: bf16 plans compute in fp32, and bf16 is what moves and rests" if slow else ""
        findings.append(Finding(f"matrix product {name}", "good", found + remark))
    single, together = peaks.copy(1), peaks.copy(threads)
    found = f"{single / GB:.1f} GB/s read and written on one thread, {together / GB:.1f} on {threads}"
    findings.append(Finding("copy", "good", found))
    return {**one, "copy": together}, findings


def _cluster(rates: dict[str, float], reading: link.LinkReading) -> Cluster:
    """One device a core: workers of one thread each is what a run on a processor starts.

    A measured link already is what collectives reach; the closed forms take `EFFICIENCY` of what a cluster says. What a
    message takes that hardly has bytes is the processors' time, of two of them.
    """
    cores = environment.cores()
    device = Device(
        name="cpu_here",
        memory=environment.memory() // cores,
        memory_bandwidth=rates["copy"] / cores,
        flops={name: rates[name] for name in DTYPES},
        link="loopback",
        efficiency=1.0,
        source=f"measured by fourfold doctor on {_processor().get('model name', platform.machine())}",
    )
    loopback = Link("loopback", 0.0, reading.bandwidth / EFFICIENCY, each=reading.latency / 2)
    return Cluster(1, cores, device, loopback, loopback)


def _keep(place: Path, cluster: Cluster) -> Finding:
    text = json.dumps(cluster.to_dict(), indent=2) + "\n"
    aside = place.with_suffix(f".{os.getpid()}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        aside.replace(place)
    except OSError as error:
        advice = "`hardware: here` will plan with defaults; make the folder writable, or set XDG_CACHE_HOME"
        return Finding("cluster file", "warning", f"{place}: {error.strerror}", advice)
    return Finding("cluster file", "good", str(place))
