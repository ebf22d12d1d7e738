"""fourfold on a GPU in one table: speed beside a plain loop, memory beside its forecast, dropout masks, NCCL.

    PYTHONPATH=src python benchmarks/gpu/run.py                       # one GPU: under six minutes; more: also NCCL
    PYTHONPATH=src python benchmarks/gpu/run.py --device cpu --small  # a dry check: it runs, nothing is measured

Needs torch and numpy; the memory forecast also psutil and rich, and is left out (it says so) without them. Exits with 1
if a check failed: masks that differ between row splits, losses that differ from the plain loop's or between plans.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from fourfold import randomness, wire
from fourfold.anatomy import survey
from fourfold.ledger import Ledger
from fourfold.models.gpt import GPT, Config
from fourfold.placement import place
from fourfold.plan import Events, Plan
from fourfold.schedule.laid import program_of
from fourfold.training.batch import batch_of
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.optimizer import OptimizerOptions, build, group_of
from fourfold.training.step import Step
from fourfold.training.throughput import flops_of, gemm_peak

PRECISIONS = ("fp32", "bf16")
RECOMPUTE = ("none", "selective", "full")
PLANS: tuple[Mapping[str, object], ...] = ({"data": 2}, {"z": 2, "shard": "optimizer"}, {"z": 2, "shard": "parameters"})
LOSS_BOUND = {"fp32": 1e-3, "bf16": 2e-2}
"""How far losses of equal steps may lie apart, relative: GPUs sum in other orders."""
MIB = 2**20


@dataclass(frozen=True)
class Size:
    """A model, its batch, and how many steps are timed."""

    layers: int
    width: int
    heads: int
    sequence: int
    rows: int
    vocabulary: int
    steps: int

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.rows * self.sequence

    def model(self) -> GPT:
        """The same weights at every call, on the CPU; no dropout, so that losses can be compared."""
        torch.manual_seed(0)
        return GPT(Config(self.vocabulary, self.sequence, self.layers, self.width, self.heads, tied=False))

    def batch(self) -> dict[str, Tensor]:
        """The same tokens at every call."""
        generator = torch.Generator().manual_seed(1)
        return {"tokens": torch.randint(self.vocabulary, (self.rows, self.sequence + 1), generator=generator)}


LARGE = Size(layers=12, width=1024, heads=16, sequence=1024, rows=8, vocabulary=32768, steps=10)
SMALL = Size(layers=1, width=32, heads=2, sequence=16, rows=4, vocabulary=64, steps=1)


@dataclass(frozen=True)
class Measured:
    """What some equal steps took.

    Attributes:
        seconds: median of a step.
        peak: bytes that tensors held at the highest moment of a steady step; None off CUDA.
        loss: of the last step.
    """

    seconds: float
    peak: int | None
    loss: float


def synchronize(device: torch.device) -> None:
    """The device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(step: Callable[[], float], size: Size, device: torch.device) -> Measured:
    """Time steps after a warm-up of three."""
    for _ in range(3):
        step()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, loss = [], math.nan
    for _ in range(size.steps):
        began = time.perf_counter()
        loss = step()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Measured(statistics.median(seconds), peak, loss)


def released(device: torch.device) -> None:
    """What the last run held is free again."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- the two loops


def ours(size: Size, placement: Mapping[str, object], world: wire.World) -> Callable[[], float]:
    """A step of fourfold: the parts of `parallelize`, without its checkpoints, which need more than torch."""
    plan = Plan.of({"placement": placement})
    mesh, events = wire.Mesh(world, plan.placement.axes(), Ledger(rank=world.rank)), Events()
    model, batch = size.model(), batch_of(size.batch())
    weights = {name: value.detach().clone().view(-1) for name, value in model.named_parameters()}
    placed = place(
        model,
        survey(model, cross_entropy, batch(range(1))),
        mesh,
        plan.placement,
        fill=lambda name, start, stop, dtype: weights[name][start:stop].to(dtype),
        group=group_of,
        events=events,
        device=world.device,
    )
    rule = plan.sync.module.Rule(plan.sync.options, mesh["data"], events, None)
    optimizer = build(OptimizerOptions(lr=1e-4), placed.shards)
    about = mesh, mesh.ledger, program_of(plan), 1, 1, world.device
    step = Step(placed, rule, optimizer, cross_entropy, *about, batch)
    numbers = iter(range(1 << 30))
    return lambda: step.run(next(numbers), batch, stop=False).loss


def plain(size: Size, precision: str, device: torch.device) -> Callable[[], float]:
    """What people write by hand: fused AdamW, and autocast over fp32 weights for bf16."""
    model = size.model().to(device)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=fused)
    tokens = size.batch()["tokens"]

    def step() -> float:
        batch = {"tokens": tokens.to(device)}
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            total, count = cross_entropy(model, batch)
        loss = total / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


# ---- sections


def forecasts(size: Size) -> tuple[dict[tuple[str, str], int], str]:
    """Forecast peaks in bytes by (precision, recompute), made before any GPU is touched, and why there are none."""
    try:
        from fourfold.hardware import Cluster
        from fourfold.planner import Subject, Traces, forecast
    except ImportError as error:
        return {}, f"no forecast of memory: {error}; pip install psutil rich"
    cluster = Cluster.parse("h100_sxm")
    subject = Subject(size.model, cross_entropy, size.batch(), size.rows, tokens_per_row=size.sequence)
    traces, found = Traces(subject), {}
    for precision in PRECISIONS:
        for recompute in RECOMPUTE:
            plan = Plan.of({"placement": {"precision": precision, "recompute": recompute}})
            found[precision, recompute] = forecast(traces, cluster, plan).peak - cluster.device.reserved
    return found, ""


def flops(size: Size) -> int:
    """FLOPs of forward and backward of a step, without recomputation."""
    one = {"tokens": size.batch()["tokens"][:1]}
    return flops_of(size.model().to("meta"), cross_entropy, one) * size.rows


def speed(size: Size, device: torch.device, predicted: dict[tuple[str, str], int]) -> bool:
    """Print the table of speed and memory; whether every loss agrees with the plain loop's."""
    work, good = flops(size), True
    world = wire.World(0, 1, "alone", device)
    print(f"{'step':<26}{'tokens/s':>12}{'MFU':>8}{'x plain':>9}{'peak MiB':>11}{'forecast':>10}{'error':>8}  loss")
    for precision in PRECISIONS:
        top = gemm_peak(precision, device)
        beside = measured(plain(size, precision, device), size, device)
        row(f"plain {precision}", beside, size, work / top, beside, None)
        released(device)
        for recompute in RECOMPUTE:
            placement = {"precision": precision, "recompute": recompute}
            mine = measured(ours(size, placement, world), size, device)
            agrees = abs(mine.loss / beside.loss - 1) <= LOSS_BOUND[precision]
            good = good and agrees
            title = f"fourfold {precision} {recompute}"
            row(title, mine, size, work / top, beside, predicted.get((precision, recompute)), agrees=agrees)
            released(device)
    return good


def row(
    title: str, one: Measured, size: Size, ideal: float, beside: Measured, forecast: int | None, *, agrees: bool = True
) -> None:
    """One line. `ideal`: seconds of the step at the measured matrix-product peak."""
    peak = f"{one.peak / MIB:.0f}" if one.peak else "-"
    said = f"{forecast / MIB:.0f}" if forecast else "-"
    error = f"{forecast / one.peak - 1:+.1%}" if forecast and one.peak else "-"
    print(
        f"{title:<26}{size.tokens / one.seconds:>12,.0f}{ideal / one.seconds:>8.1%}{beside.seconds / one.seconds:>9.3f}"
        f"{peak:>11}{said:>10}{error:>8}  {one.loss:.4f}{'' if agrees else '  DIFFERS from the plain loop'}",
        flush=True,
    )


def masks(size: Size, device: torch.device) -> bool:
    """Rows draw the same dropout masks however they are split over ranks and micro-batches."""
    ones, rows = torch.ones(size.rows, size.sequence, size.width, device=device), size.rows

    def drawn(start: int, stop: int) -> Tensor:
        with randomness.at(randomness.Position(1, 7, start, stop - start)):
            return randomness.dropout(ones[start:stop], 0.1, "site") != 0

    whole = drawn(0, rows)
    same = all(
        torch.equal(whole, torch.cat([drawn(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]))
        for cuts in ([0, 1, rows], [0, rows // 2, rows], list(range(rows + 1)))
    )
    kept = float(whole.double().mean())
    likely = abs(kept - 0.9) < 5 * math.sqrt(0.09 / whole.numel())
    print(f"dropout masks on {device.type}: {'equal' if same else 'DIFFERENT'} over three row splits; {kept:.4%} kept")
    return same and likely


def rank(index: int, port: int, backend: str, size: Size) -> None:
    """One of two processes: a loss and a time for every plan; the first prints them."""
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    world = wire.join(backend, timeout=120.0)
    for precision in PRECISIONS:
        beside = measured(plain(size, precision, world.device), size, world.device)
        released(world.device)
        for placement in PLANS:
            one = measured(ours(size, {**placement, "precision": precision}, world), size, world.device)
            released(world.device)
            agrees = abs(one.loss / beside.loss - 1) <= LOSS_BOUND[precision]
            if index == 0:
                title, rate = f"{backend} {Plan.of({'placement': placement})} {precision}", size.tokens / one.seconds
                words = "agrees" if agrees else "DIFFERS from the plain loop"
                print(f"{title:<40}{rate:>12,.0f} tokens/s  loss {one.loss:.4f} {words}", flush=True)
            if not agrees:
                raise SystemExit(1)
    world.leave()


def ranks(size: Size, device: torch.device) -> bool:
    """Two ranks, one GPU each (gloo on the CPU); true also where there is only one GPU, and says so."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        print("NCCL: not run, there is one GPU")
        return True
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        spawn(rank, args=(port, backend, size), nprocs=2)
    except ProcessExitedException:  # it has printed which plan differs
        return False
    return True


def main() -> int:
    """Everything; 1 if a check failed, 2 if there is no such device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model: checks that everything runs")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; for a dry check of the code: --device cpu --small", file=sys.stderr)
        return 2
    device, size = torch.device(arguments.device), SMALL if arguments.small else LARGE
    predicted, missing = forecasts(size)  # in forked processes: before this one touches the GPU
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}; {size}")
    if missing:
        print(missing)
    good = [speed(size, device, predicted), masks(size, device), ranks(size, device)]
    if device.type != "cuda":
        print("DRY CHECK on the CPU: nothing was measured on a GPU, and the figures above mean nothing.")
    print("all checks passed" if all(good) else "A CHECK FAILED")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
