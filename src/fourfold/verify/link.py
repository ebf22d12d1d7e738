"""A real collective between two processes of this machine: does it work, how long does it take.

Run as a module this file is one of the two processes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from time import perf_counter

SMALL, LARGE = 1 << 10, 1 << 24
"""Bytes of the two all-reduces from which latency and bandwidth are read."""


class LinkError(RuntimeError):
    """The two processes could not talk: holds what the failing one said last."""


@dataclass(frozen=True)
class LinkReading:
    """What two processes reached.

    Attributes:
        latency: seconds of one message of an all-reduce (which is two, one after the other).
        bandwidth: bytes/s that a rank hands to the network in one direction.
        seconds: of the whole probe, start of both processes included.
    """

    latency: float
    bandwidth: float
    seconds: float


def measure(timeout: float = 150.0) -> LinkReading:
    """Start two processes over loopback, let them all-reduce, and read latency and bandwidth.

    Raises:
        LinkError: a process failed, answered wrongly, or took longer than `timeout` seconds; none is left behind.
    """
    begin = perf_counter()
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "fourfold.verify.link"],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=max(1.0, timeout - (perf_counter() - begin))) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise LinkError(f"two processes did not finish an all-reduce within {timeout:g} s") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, (_, complaint)) in enumerate(zip(processes, answers, strict=True)):
        if process.returncode:
            last = complaint.strip().splitlines()[-1:] or ["nothing"]
            raise LinkError(f"process {rank} of 2 ended with {process.returncode}; it said last: {last[0]}")
    latency, bandwidth = json.loads(answers[0][0])
    return LinkReading(latency, bandwidth, perf_counter() - begin)


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _one_of_two() -> None:
    """Join the other process, sum, check the sum, and (rank 0) write `[latency, bandwidth]`."""
    import torch

    from fourfold import wire
    from fourfold.ledger import Ledger

    world = wire.join("gloo", timeout=60.0)
    axis = wire.Mesh(world, {"data": 2}, Ledger())["data"]
    torch.set_num_threads(1)
    times = {}
    for nbytes, repeats in ((SMALL, 50), (LARGE, 6)):
        tensor = torch.full((nbytes // 4,), float(world.rank + 1))
        axis.all_reduce(tensor, "control").wait()
        if not bool((tensor == 3).all()):
            raise LinkError(f"an all-reduce of 1 and 2 over {nbytes} bytes gave {tensor.unique().tolist()}, expected 3")
        tensor.zero_()
        runs = []
        for _ in range(repeats):
            axis.barrier()
            start = perf_counter()
            axis.all_reduce(tensor, "control").wait()
            runs.append(perf_counter() - start)
        times[nbytes] = min(runs)  # what the machine reaches; the slower ones measure its other work
    if world.rank == 0:
        latency = times[SMALL] / 2
        json.dump([latency, LARGE / max(times[LARGE] - 2 * latency, 1e-9)], sys.stdout)
    world.leave()


if __name__ == "__main__":
    _one_of_two()
