"""What kernels allocate inside themselves, which no trace can see: measured, once for each operator and shape.

Convolutions hold as much again as they return, layer norm and attention a good part. Each distinct operator is run
alone under the profiler, with inputs of the same shapes, strides and types; the allocator's peak beyond what remains
afterwards is its workspace. Results are kept in memory and in the user's cache folder, by version and thread count.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold import randomness
from fourfold.planner.isolate import IsolationError, isolated
from fourfold.planner.measure import measured_peak

BUDGET_FLOPS = 4e9
BUDGET_BYTES = 256 * 1024**2
"""An operator beyond these is not run at its own size but at two small ones, and extrapolated."""

RECURRENT = ("rnn", "lstm", "gru")
"""Kernels that read packed weights through pointers, and may not survive made-up inputs."""

PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
"""Matrix products in fp32 and fp64 hold nothing; a test measures that."""


def sizes(operators: Sequence[dict[str, Any]], small: Sequence[Sequence[dict[str, Any]]] = ()) -> list[int]:
    """Workspace in bytes of each operator of a tape (see `recorder`).

    Args:
        operators: at the size that will run.
        small: the same operators at two smaller sizes, first and second, for those too large to try.
    """
    known = _load()
    before = len(known)
    found = [_size(number, operator, small, known) for number, operator in enumerate(operators)]
    if len(known) > before:
        _keep(known)
    return found


def _size(
    number: int, operator: dict[str, Any], small: Sequence[Sequence[dict[str, Any]]], known: dict[str, int]
) -> int:
    if operator["name"].startswith(PRODUCTS) and _wide(operator):
        return 0
    if operator["flops"] <= BUDGET_FLOPS and operator["bytes"] <= BUDGET_BYTES:
        return _measured(operator, known)
    first, second = (
        ((_measured(row[number], known), row[number]["bytes"]) for row in small) if small else ((0, 1), (0, 2))
    )
    if second[1] == first[1]:
        return first[0]
    slope = (second[0] - first[0]) / (second[1] - first[1])
    return max(0, round(first[0] + slope * (operator["bytes"] - first[1])))


def _wide(operator: dict[str, Any]) -> bool:
    described = json.dumps(operator["args"])
    return "float16" not in described


def _measured(operator: dict[str, Any], known: dict[str, int]) -> int:
    key = hashlib.sha256(json.dumps([operator["name"], operator["args"], operator["kwargs"]]).encode()).hexdigest()[:24]
    if key not in known:
        known[key] = _apart(operator) if any(word in operator["name"] for word in RECURRENT) else measure(operator)
    return known[key]


def _apart(operator: dict[str, Any]) -> int:
    """Measure in a process of its own; 0 where the operator does not survive made-up inputs."""
    try:
        return int(isolated(lambda: measure(operator)))
    except IsolationError:
        return 0


def measure(operator: dict[str, Any]) -> int:
    """Run one operator twice alone and return what the second run held at its peak beyond what it left."""
    namespace, name, overload = operator["name"].split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    try:
        with torch.no_grad(), randomness.at(randomness.Position(seed=0, step=0, row=0, rows=1)):
            args, kwargs = rebuild(operator["args"]), rebuild(operator["kwargs"])
            function(*args, **kwargs)
            found = measured_peak(lambda: function(*args, **kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return 0  # an operator that needs values which made-up inputs do not have
    return found.peak - max(found.end, 0)


def rebuild(described: Any) -> Any:
    """Arguments equal in shape, stride and type to those that `recorder.describe` was given."""
    if isinstance(described, list):
        return [rebuild(entry) for entry in described]
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        shape, stride = described["tensor"]
        return _tensor(shape, stride, getattr(torch, described["dtype"]))
    if "dtype" in described:
        return getattr(torch, described["dtype"])
    if "float" in described:
        return float(described["float"])
    if "mapping" in described:
        return {key: rebuild(entry) for key, entry in described["mapping"].items()}
    return None


def _tensor(shape: list[int], stride: list[int], dtype: torch.dtype) -> Tensor:
    """Ones where that is a number to compute with, zeros where it may be an index."""
    span = 1 + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    flat = (
        torch.ones(span, dtype=dtype)
        if dtype.is_floating_point or dtype == torch.bool
        else torch.zeros(span, dtype=dtype)
    )
    return flat.as_strided(shape, stride)


# ---- what is known


_KNOWN: dict[str, dict[str, int]] = {}


def cache_file() -> Path:
    """Where results rest: one file for each torch version, processor and thread count."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    about = (
        f"{torch.__version__}-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}-{torch.get_num_threads()}"
    )
    return root / "fourfold" / f"workspace-{about.replace(' ', '_')}.json"


def _load() -> dict[str, int]:
    place = cache_file()
    if str(place) not in _KNOWN:
        try:
            read = json.loads(place.read_text(encoding="utf-8"))
            good = isinstance(read, dict) and all(isinstance(size, int) for size in read.values())
        except (OSError, ValueError):
            read, good = {}, True
        _KNOWN[str(place)] = read if good else {}
    return _KNOWN[str(place)]


def _keep(known: dict[str, int]) -> None:
    """Write aside and rename; a folder that cannot be written costs only the memory of what was measured."""
    place = cache_file()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False, encoding="utf-8") as aside:
            json.dump(known, aside)
        os.replace(aside.name, place)
    except OSError:
        return
