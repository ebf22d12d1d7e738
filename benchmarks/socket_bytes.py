"""Bytes that fourfold counts beside bytes that cross the socket, collective by collective, on 2 to 4 gloo ranks.

The ranks run in a network namespace of their own, where nothing else speaks, so the counters of its only interface are
what they sent. The interface counts packets with their headers (66 bytes each: Ethernet 14, IPv4 20, TCP with
timestamps 32), acknowledgements too; how many there are depends on how busy the machine is (0.1 % of the bytes on a
quiet one, over 1 % on a crowded one). What the sockets were handed is the bytes less 66 a packet: that is what is
compared, and the plain counter stands beside it. Of five runs the median is taken, since TCP sends some segments twice
on a crowded machine. Needs Linux and the right to make a namespace (root, or unprivileged user namespaces).

    python benchmarks/socket_bytes.py [--json] [--megabytes 4]

Exit code 0 if every ratio is within 1 %, 1 if not, 2 if no namespace can be made here.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

TOLERANCE = 0.01
HEADERS = 66
REPEATS = 5
SIZES = (2, 3, 4)


class Row(NamedTuple):
    """One collective on one number of ranks: bytes of all ranks together, as counted, and as they crossed."""

    ranks: int
    op: str
    metered: int
    interface: int
    packets: int

    @property
    def socket(self) -> int:
        """Bytes that the sockets were handed."""
        return self.interface - HEADERS * self.packets

    @property
    def ratio(self) -> float:
        return self.socket / self.metered


def namespace() -> list[str] | None:
    """The command that runs another in a network namespace of its own; None where that cannot be had."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return None
    for command in (["unshare", "-n"], ["unshare", "-Urn"]):
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    return None


def loopback_up() -> None:
    """Raise the interface `lo` of this (fresh) namespace: ioctl SIOCGIFFLAGS, then SIOCSIFFLAGS with IFF_UP."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(control, 0x8913, request))
        fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", flags | 1))


def transmitted() -> tuple[int, int]:
    """Bytes and packets that this namespace's `lo` has sent."""
    with open("/proc/self/net/dev") as file:
        line = next(line for line in file if line.strip().startswith("lo:"))
    fields = line.split(":")[1].split()
    return int(fields[8]), int(fields[9])


def cases(axis: Any, count: int) -> dict[str, Callable[[], Any]]:
    """Every collective once, on `count` elements or a few more or less; each returns works to wait for."""
    import torch

    from fourfold.wire.codecs.bf16 import Codec

    n, at = axis.size, axis.index
    full, odd, other = torch.ones(count), torch.ones(count + 1), torch.empty(count)
    shard, codec = torch.ones(count // n), Codec()
    uneven = [(1 + i + j) * (count // 16) for i in range(n) for j in range(n)]
    ins, outs = uneven[at * n : at * n + n], uneven[at::n]
    inp, out = torch.ones(sum(ins)), torch.empty(sum(outs))
    return {
        "all_reduce": lambda: [axis.all_reduce(full, "gradient")],
        "all_reduce, uneven": lambda: [axis.all_reduce(odd, "gradient")],
        "all_reduce, bf16": lambda: [axis.all_reduce(full, "gradient", codec=codec)],
        "all_gather": lambda: [axis.all_gather(other, shard, "weight")],
        "all_gather, bf16": lambda: [axis.all_gather(other, shard, "weight", codec=codec)],
        "reduce_scatter": lambda: [axis.reduce_scatter(shard, full, "gradient")],
        "reduce_scatter, bf16": lambda: [axis.reduce_scatter(shard, full, "gradient", codec=codec)],
        "all_to_all": lambda: [axis.all_to_all(other, full, "activation")],
        "all_to_all, uneven": lambda: [axis.all_to_all(out, inp, "activation", outs, ins)],
        "broadcast": lambda: [axis.broadcast(full, 0, "weight")],
        "reduce": lambda: [axis.reduce(full, n - 1, "weight")],
        "send": lambda: [
            axis.send(full, (at + 1) % n, "activation"),
            axis.receive(other, (at - 1) % n, "activation"),
        ],
    }


def measure(rank: int, size: int, megabytes: float, answers: Any) -> None:
    """One rank: run every case, and tell the parent what was counted and what crossed."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    import torch

    from fourfold import wire

    torch.set_num_threads(1)
    world = wire.join("gloo", timeout=60)
    mesh = wire.Mesh(world, {"data": size})
    axis = mesh["data"]
    count = int(megabytes * 2**20) // 4 // 48 * 48
    for name, run in cases(axis, count).items():
        for work in run():  # connections and buffers exist from here on
            work.wait()
        sent = _payload(mesh.ledger)
        crossed = sorted(once(axis, run) for _ in range(REPEATS))[REPEATS // 2]
        total = sum(int(one[0]) for one in axis.collect([_payload(mesh.ledger) - sent]))
        if rank == 0:
            answers.put(Row(size, name, total // REPEATS, *crossed))
    world.leave()


def once(axis: Any, run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes and packets of one run: nobody has begun at the first reading, all are done at the second."""
    axis.barrier()
    bytes_before, packets_before = transmitted()
    axis.barrier()
    for work in run():
        work.wait()
    axis.barrier()
    bytes_after, packets_after = transmitted()
    axis.barrier()
    return bytes_after - bytes_before, packets_after - packets_before


def _payload(ledger: Any) -> int:
    return sum(one.bytes for flow, one in ledger.traffic().items() if flow.kind != "control")


def rows(megabytes: float) -> list[Row]:
    """All cases on 2, 3 and 4 ranks. Call it inside a fresh namespace."""
    loopback_up()
    import torch  # noqa: F401

    import fourfold.wire  # noqa: F401  (imported once here; the ranks are forks)

    context = multiprocessing.get_context("fork")
    found = []
    for size in SIZES:
        answers = context.Queue()
        ranks = [context.Process(target=measure, args=(rank, size, megabytes, answers)) for rank in range(size)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        if any(one.exitcode for one in ranks):
            raise SystemExit(f"a rank of {size} failed: exit codes {[one.exitcode for one in ranks]}")
        while not answers.empty():
            found.append(answers.get())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        command = namespace()
        if command is None:
            print("socket_bytes: no network namespace can be made here; run it as root on Linux", file=sys.stderr)
            return 2
        return subprocess.run([*command, sys.executable, *sys.argv, "--inside"], check=False).returncode
    found = rows(options.megabytes)
    if options.json:
        print(json.dumps([row._asdict() | {"socket": row.socket, "ratio": row.ratio} for row in found]))
    else:
        for row in found:
            counts = f"counted {row.metered:>11,}  sockets {row.socket:>11,}  interface {row.interface:>11,}"
            print(f"{row.ranks} ranks  {row.op:22s} {counts}  sockets ÷ counted {row.ratio:.4f}")
    return int(any(abs(row.ratio - 1) > TOLERANCE for row in found))


if __name__ == "__main__":
    sys.exit(main())
