"""What a rank joins: who it is, how many there are, and what connects them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fourfold.wire.backends.channel import Fabric
from fourfold.wire.errors import UsageError
from fourfold.wire.watch import Watch

BACKENDS = ("auto", "gloo", "nccl")


@dataclass(eq=False)
class World:
    """One rank's view of all ranks.

    Attributes:
        rank, size: who this is, of how many.
        backend: "alone", "threads", "gloo" or "nccl".
        device: where this rank's tensors live.
        fabric: what connects the ranks (None in a world of one).
        watch: told of every collective, for the parent to read; or None.
    """

    rank: int
    size: int
    backend: str
    device: torch.device
    fabric: Fabric | None = field(default=None, repr=False)
    watch: Watch | None = field(default=None, repr=False)

    def leave(self) -> None:
        """Let go of the process group and the watch. Leaving twice does nothing."""
        fabric, self.fabric = self.fabric, None
        if fabric is not None:
            fabric.leave()
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()


def join(backend: str = "auto", timeout: float = 300.0, watch: Path | str | None = None) -> World:
    """Join the world that torchrun's environment describes, or be a world of one.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and torchrun's TORCHELASTIC_RUN_ID,
    TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_USE_AGENT_STORE.

    Args:
        backend: "gloo", "nccl", or "auto": nccl where there is a CUDA device for each local rank, else gloo.
        timeout: how long a collective may take before it is an error (s).
        watch: an existing folder in which this rank keeps its watch file.

    Raises:
        UsageError: an unknown backend, or an environment that is incomplete or contradicts itself.
    """
    if backend not in BACKENDS:
        raise UsageError(f"backend: expected one of {', '.join(BACKENDS)}, found {backend!r}")
    world = _connect(backend, timeout)
    if watch is not None:
        world.watch = Watch(watch, world.rank)
    return world


def _connect(backend: str, timeout: float) -> World:
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return alone()
    rank, size = whole("RANK"), whole("WORLD_SIZE")
    if not 0 <= rank < size:
        raise UsageError(f"environment: RANK = {rank} is not one of WORLD_SIZE = {size} ranks (0 … {size - 1})")
    if size == 1:
        return alone()
    from fourfold.wire.backends import process_group

    if backend == "auto":
        backend = "nccl" if _cuda_for_each() else "gloo"
    return process_group.join(backend, rank, size, timeout)


def alone() -> World:
    """A world of one rank, without any process group."""
    return World(0, 1, "alone", torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def whole(name: str) -> int:
    """A whole number from the environment.

    Raises:
        UsageError: it is missing, or something else.
    """
    value = os.environ.get(name)
    if value is None or not value.isdecimal():
        raise UsageError(
            f"environment: expected a whole number in {name}, found {value!r}; start the ranks by torchrun"
        )
    return int(value)


def _cuda_for_each() -> bool:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.cuda.is_available() and torch.cuda.device_count() >= local and torch.distributed.is_nccl_available()
