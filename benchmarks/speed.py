"""Training speed of two gloo ranks beside torch's own: FSDP2, DDP and DTensor's tensor parallelism.

    python benchmarks/speed.py --mode parameters --size large
    python benchmarks/speed.py --mode replicas --size tiny --pairs 31
    python benchmarks/speed.py --mode tensor --size large

`parameters` are sharded parameters (`z: 2`) beside FSDP2, `depth` the same weights by the z axis of the 4D grid,
`replicas` whole copies (`data: 2`) beside DDP, and `tensor` is the y axis of the 4D grid beside `parallelize_module`.
`1f1b` and `interleaved` are pipelines of two workers with eight micro-batches, cut alike, beside torch's schedules.

Both frameworks train the same GPT on the same tokens, in the same two processes, one thread a rank, fused AdamW each.
A round is the peer, fourfold and the peer again, in alternating order; peer / peer is the control. Printed are medians
of the rounds' ratios of wall time with 95 % bootstrap intervals, and CPU seconds summed over the ranks. A ratio above
1 means that fourfold is faster. The run decides nothing unless the control holds 1 within 3 %. Before anything is timed
the losses of both must be equal, step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from fourfold import wire
from fourfold.models.gpt import GPT, Config
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize

RANKS = 2


@dataclass(frozen=True)
class Size:
    """A model, its batch, and how many steps make one timed block."""

    layers: int
    width: int
    heads: int
    sequence: int
    rows: int
    vocabulary: int
    steps: int


SIZES = {
    "large": Size(layers=6, width=384, heads=6, sequence=256, rows=8, vocabulary=4096, steps=1),
    "tiny": Size(layers=4, width=128, heads=4, sequence=64, rows=4, vocabulary=512, steps=20),
}


def build(size: Size) -> GPT:
    """The same weights on every rank."""
    torch.manual_seed(0)
    shape = Config(size.vocabulary, size.sequence, size.layers, size.width, size.heads, tied=False)
    return GPT(shape)


@dataclass(frozen=True)
class Mode:
    """What is compared.

    Attributes:
        placement: fourfold's.
        peer: torch's own, from a model to its step.
        name: of the peer.
        target: tokens/s of fourfold ÷ peer that it is to reach.
        schedule: fourfold's.
    """

    placement: dict[str, Any]
    peer: Callable[[GPT], peers.Step]
    name: str
    target: float
    schedule: dict[str, Any] = field(default_factory=dict)


MODES = {
    "parameters": Mode({"z": RANKS, "shard": "parameters"}, peers.fsdp, "FSDP2", 1.05),
    "depth": Mode({"tensor": {"algorithm": "4d", "z": RANKS}}, peers.fsdp, "FSDP2", 1.05),
    "replicas": Mode({"data": RANKS}, peers.ddp, "DDP", 1.0),
    "1f1b": Mode(
        {"pipe": RANKS, "cut": [5, 5]},
        peers.pipeline(Schedule1F1B, 8, (3, 3)),
        "torch.distributed.pipelining",
        1.0,
        {"name": "1f1b", "microbatches": 8},
    ),
    "interleaved": Mode(
        {"pipe": RANKS, "cut": [4, 2, 1, 3]},
        peers.pipeline(ScheduleInterleaved1F1B, 8, (2, 2, 1, 1)),
        "torch.distributed.pipelining",
        1.0,
        {"name": "interleaved", "microbatches": 8},
    ),
    "tensor": Mode({"tensor": {"algorithm": "4d", "y": RANKS}}, peers.tensor, "DTensor", 1.15),
}


def ours(size: Size, mode: Mode, world: wire.World) -> peers.Step:
    """A step of fourfold on the global batch."""
    options = OptimizerOptions(lr=peers.RATE, weight_decay=peers.DECAY)
    plan = {"placement": mode.placement, **({"schedule": mode.schedule} if mode.schedule else {})}
    run = parallelize(build(size), cross_entropy, options, plan, world=world)
    return lambda tokens: run.step({"tokens": tokens}).loss


def check(steps: dict[str, peers.Step], batches: list[Tensor]) -> None:
    """Both train the same: their losses agree, step by step.

    Raises:
        SystemExit: they do not.
    """
    for number, tokens in enumerate(batches):
        found = {name: torch.tensor(step(tokens), dtype=torch.float64) for name, step in steps.items()}
        for loss in found.values():
            dist.all_reduce(loss)
        if not torch.allclose(found["fourfold"], found["peer"], rtol=1e-4):
            losses = {name: float(loss) / RANKS for name, loss in found.items()}
            raise SystemExit(f"step {number}: expected equal losses, found {losses}; the work is not the same")


def timed(step: peers.Step, batches: list[Tensor]) -> tuple[float, float]:
    """Wall seconds of the slower rank, and CPU seconds of both."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for tokens in batches:
        step(tokens)
    spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
    slowest, total = spent[:1].clone(), spent[1:].clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slowest), float(total)


def rank(index: int, port: int, arguments: argparse.Namespace) -> None:
    """One of the two processes."""
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    world = wire.join("gloo")
    size, mode = SIZES[arguments.size], MODES[arguments.mode]
    steps = {"fourfold": ours(size, mode, world), "peer": mode.peer(build(size))}
    generator = torch.Generator().manual_seed(1)
    shape = (size.rows, size.sequence + 1)
    batches = [torch.randint(size.vocabulary, shape, generator=generator) for _ in range(size.steps)]
    check(steps, batches)
    for _ in range(2):
        for step in steps.values():
            timed(step, batches)
    rounds = []
    for number in range(arguments.pairs):
        order = ("peer", "fourfold", "again") if number % 2 == 0 else ("again", "fourfold", "peer")
        measured = {name: timed(steps["peer" if name == "again" else name], batches) for name in order}
        rounds.append(measured)
        if index == 0:
            wall = {name: round(value[0] / size.steps * 1e3, 1) for name, value in measured.items()}
            print(f"round {number + 1}: milliseconds a step {wall}", flush=True)
    if index == 0:
        report(rounds, arguments, size)
    dist.barrier()
    world.leave()


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval."""
    random = np.random.default_rng(0)
    values = np.array(ratios)
    medians = np.median(random.choice(values, (10_000, len(values))), axis=1)
    return statistics.median(ratios), *np.quantile(medians, [0.025, 0.975]).tolist()


def report(rounds: list[dict[str, tuple[float, float]]], arguments: argparse.Namespace, size: Size) -> None:
    """Print the table."""
    peer_name, target = MODES[arguments.mode].name, MODES[arguments.mode].target
    speed = interval([(one["peer"][0] + one["again"][0]) / 2 / one["fourfold"][0] for one in rounds])
    control = interval([one["again"][0] / one["peer"][0] for one in rounds])
    cpu = interval([(one["peer"][1] + one["again"][1]) / 2 / one["fourfold"][1] for one in rounds])
    tokens = size.rows * size.sequence * size.steps
    decides = control[1] <= 1 <= control[2] and (control[2] - control[1]) / 2 <= 0.03
    met = (speed[0] >= target or speed[2] >= target) and speed[1] >= 0.97 * target
    result = {
        "mode": arguments.mode,
        "size": arguments.size,
        "rounds": len(rounds),
        f"fourfold / {peer_name}, tokens per second": speed,
        f"{peer_name} / {peer_name} (control)": control,
        f"{peer_name} / fourfold, CPU seconds": cpu,
        "fourfold tokens/s": tokens / statistics.median(one["fourfold"][0] for one in rounds),
        f"{peer_name} tokens/s": tokens / statistics.median(one["peer"][0] for one in rounds),
        "target": target,
        "verdict": ("met" if met else "not met") if decides else "undecided: the control does not hold 1 within 3 %",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }
    print(json.dumps(result, indent=1))


def main() -> None:
    """Start both ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=tuple(MODES), required=True)
    parser.add_argument("--size", choices=tuple(SIZES), required=True)
    parser.add_argument("--pairs", type=int, default=21)
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank, args=(port, arguments), nprocs=RANKS)


if __name__ == "__main__":
    main()
