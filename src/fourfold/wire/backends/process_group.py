"""Joining torch's process groups: the store, the interface, the groups."""

from __future__ import annotations

import atexit
import ipaddress
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fourfold.wire.backends.channel import Channel
from fourfold.wire.backends.gloo import GlooChannel
from fourfold.wire.backends.nccl import NcclChannel
from fourfold.wire.errors import WireError
from fourfold.wire.world import World, whole

RECORDER = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
"""Settings of torch's flight recorder, which keeps the last 2000 collectives with their stacks.

Only NCCL's watchdog ever writes it out; beside gloo it is off unless the person sets one of these, and `wire.Watch`
tells who is missing. Its small, long-lived entries lie between the large blocks of the heap, which then cannot shrink:
two ranks on a model of 11 M parameters grew from 0.47 to 1.26 GB in 80 steps with it (to 0.65 GB with 100 entries), and
stayed at 0.45 GB without.
"""


def join(backend: str, rank: int, size: int, timeout: float) -> World:
    """Connect this process to the others.

    The store is prefixed by run and restart: torchrun's agent keeps its store across restarts, and without the prefix
    the new workers of a gloo world read the dead ones' addresses and never come back (measured at four ranks).
    """
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), whole("MASTER_PORT")
    if backend == "gloo" and is_loopback(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if os.path.exists("/sys/class/net/lo") else "lo0")
    if backend == "gloo" and not os.environ.keys() & RECORDER:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = timedelta(seconds=timeout)
    store = _store(address, port, size, is_master=rank == 0 and not agent, timeout=limit)
    run, restart = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    own = dist.PrefixStore(f"{run}/{restart}", store)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)
    return World(rank, size, backend, device, fabric=GroupFabric(backend, rank, limit))


class GroupFabric:
    """Channels on torch's process groups.

    Groups are made one by one and not through a DeviceMesh, which cannot be told a time-out for its groups and makes
    one for every axis, of size one too; `use_local_synchronization` keeps the cost independent of the world's size.
    """

    def __init__(self, backend: str, rank: int, timeout: timedelta) -> None:
        self.backend, self.rank, self.timeout = backend, rank, timeout
        self._gloo: list[GlooChannel] = []
        atexit.register(self.end)

    def channel(self, name: str, members: Sequence[int], ordered: bool) -> Channel:
        """A channel among `members`, on a group of its own."""
        try:
            group = dist.new_group(
                list(members),
                timeout=self.timeout,
                backend=self.backend,
                use_local_synchronization=True,
                group_desc=name,
            )
        except RuntimeError as error:
            ranks = ", ".join(map(str, members))
            raise WireError(
                f"rank {self.rank}: axis {name} (ranks {ranks}) could not be connected within "
                f"{self.timeout.total_seconds():g} s: {error}; make the same meshes in the same order on every rank"
            ) from error
        assert isinstance(group, dist.ProcessGroup)  # this rank is a member
        index = list(members).index(self.rank)
        if self.backend == "nccl":
            return NcclChannel(group, len(members), index, ordered)
        self._gloo.append(GlooChannel(group, len(members), index))
        return self._gloo[-1]

    def leave(self) -> None:
        """Destroy every group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def end(self) -> None:
        """At the end of the process: no thread of a group may outlive Python.

        Not sooner: it closes the connections, and a rank that failed says so before the others notice that it is gone.
        """
        atexit.unregister(self.end)
        self.leave()
        while self._gloo:
            self._gloo.pop().close()


def _store(address: str, port: int, size: int, *, is_master: bool, timeout: timedelta) -> Any:
    return dist.TCPStore(address, port, size, is_master, timeout, False)  # pyright: ignore[reportPrivateImportUsage]


def is_loopback(address: str) -> bool:
    """Ranks at this address are all on this machine, so nothing else needs to reach them."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
