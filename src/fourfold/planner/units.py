"""Sizes and durations as people read them."""

from __future__ import annotations

from fourfold.hardware.cluster import GIB


def in_seconds(value: float) -> str:
    """A duration as people read it."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def in_bytes(value: float) -> str:
    """A size as people read it."""
    for unit, size in (("GiB", GIB), ("MiB", 1024**2), ("KiB", 1024)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"
