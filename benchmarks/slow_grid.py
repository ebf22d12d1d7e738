"""Plans beside one another on slow links: 8 gloo ranks, each in a network namespace of its own behind an emulated link.

    python benchmarks/slow_grid.py --suite grid
    python benchmarks/slow_grid.py --suite sharding --rounds 15
    python benchmarks/slow_grid.py --suite ranking --rounds 2

Every plan trains the same GPT (M = 4h tokens a step) from the same weights in the same eight processes, one thread a
rank. Two all-reduces among them say first what a collective costs here: forecasts are made with that. A round is every
plan once and once more in the opposite order; rounds begin at either end in turn. Printed are: what the links really
do; for each plan its step, the bytes that a rank hands over on each axis, and forecast ÷ measured; then the medians of
the rounds' ratios with 95 % bootstrap intervals, a peer's second step ÷ its first as control. The run decides nothing
unless the control holds 1 within 3 %. On a machine with other work `chrt --rr 1` before the command keeps that out:
ranks and switch then run whenever they can, and sleep most of the time. Needs Linux and root (or `unshare --user --map-
root-user --net`).

The suite "ranking" asks what AxoNN's authors ask of their model: is the grid that is forecast to be the best among the
three fastest that are measured, of all twenty x * y * z * data of eight ranks?

The defaults are chosen so that links bind and not the two cores that eight ranks and the switch share: a step of `y 8`
spends 2.4 s of its 3.0 on the links. Wider is mostly compute, narrower mostly the 2 to 4 ms that any collective takes.

Exit code 0 if every row is met, 1 if not, 2 if there can be no slow links here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from slow_links import SlowLinks, SlowLinksError
from speed import interval

from fourfold import wire
from fourfold.hardware import Cluster, Link
from fourfold.hardware.collectives import EFFICIENCY
from fourfold.models.gpt import GPT, Config
from fourfold.plan import Plan
from fourfold.planner import Subject, Traces, forecast, search
from fourfold.planner.grids import grids
from fourfold.planner.here import probe
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import Run, parallelize

RANKS = 8
PORT = 29500
SMALL, LARGE = 1 << 10, 1 << 22
"""Bytes of the all-reduces that say what the links and the processors do to a collective."""
PLANNED = "planned"
"""The name of whatever the planner puts first."""


@dataclasses.dataclass(frozen=True)
class Row:
    """`plan` is at least `times` as fast as the fastest of `peers`."""

    plan: str
    peers: tuple[str, ...]
    times: float


PLACEMENTS: dict[str, dict[str, Any]] = {
    "y 8": {"tensor": {"algorithm": "4d", "y": 8}},
    "x 2, y 4": {"tensor": {"algorithm": "4d", "x": 2, "y": 4}},
    "zero-3": {"z": 8, "shard": "parameters"},
    "zero-1": {"z": 8, "shard": "optimizer"},
    "data": {"data": 8},
}
GRIDS = {str(grid): grid.settings() for grid in grids(RANKS)}
PLACEMENTS |= GRIDS
NAMED = 3
"""The grid that is forecast to be the best is to be among so many fastest."""

SUITES: dict[str, tuple[Row, ...]] = {
    "ranking": (),
    "grid": (Row(PLANNED, ("y 8", "zero-3"), 1.4), Row("x 2, y 4", ("y 8",), 1.08)),
    "sharding": (Row("data", ("zero-3",), 1.0), Row("zero-1", ("zero-3",), 1.0)),
}


@dataclasses.dataclass(frozen=True)
class Size:
    """A GPT and its batch: 8 rows of width / 2 tokens."""

    layers: int
    width: int
    vocabulary: int

    @property
    def sequence(self) -> int:
        return self.width // 2

    def build(self) -> GPT:
        torch.manual_seed(0)
        return GPT(Config(self.vocabulary, self.sequence, self.layers, self.width, heads=8, tied=False))

    def tokens(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.vocabulary, (RANKS, self.sequence + 1), generator=generator)


@dataclasses.dataclass(frozen=True)
class Lap:
    """One step: wall seconds of the slowest rank, CPU seconds of all."""

    wall: float
    cpu: float


@dataclasses.dataclass(frozen=True)
class Job:
    """What the ranks do."""

    size: Size
    plans: Mapping[str, Plan]
    rounds: int


# -- the ranks


Work = Callable[[wire.World], Iterator[Any]]
"""What a rank does, and what the first one tells of it."""


def rank(index: int, links: SlowLinks, port: int, work: Work, answers: Connection) -> None:
    """One of the processes. The first tells what all have measured; any tells why it failed."""
    links.enter(index)
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": links.addresses[0], "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        world = wire.join("gloo", timeout=120)
        for answer in work(world):
            if index == 0:
                answers.send(answer)
        world.leave()
    except Exception as error:
        answers.send(f"rank {index} of {RANKS}: {type(error).__name__}: {error}")
        raise SystemExit(1) from error


def collectives(world: wire.World) -> Iterator[dict[int, float]]:
    """Seconds of all-reduces among all, by bytes: the least of some, since the slower ones measure other work."""
    everyone = wire.Mesh(world, {"data": RANKS})["data"]
    took: dict[int, float] = {}
    for nbytes, repeats in ((SMALL, 40), (LARGE, 4)):
        tensor = torch.zeros(nbytes // 4)
        runs = []
        for _ in range(repeats):
            everyone.barrier()
            began = time.perf_counter()
            everyone.all_reduce(tensor, "control").wait()
            runs.append(max(one[0] for one in everyone.collect([time.perf_counter() - began])))
        took[nbytes] = min(runs) if nbytes == LARGE else statistics.median(runs)
    yield took


def answered(world: wire.World, job: Job) -> Iterator[dict[str, Any]]:
    """Bytes by plan and axis, then the laps of each round by plan."""
    everyone = wire.Mesh(world, {"data": RANKS})["data"]
    batch = {"tokens": job.size.tokens()}
    runs: dict[str, Run] = {}
    for name, plan in job.plans.items():
        runs[name] = parallelize(job.size.build(), cross_entropy, OptimizerOptions(lr=1e-4), plan, world=world)
        for _ in range(2):  # connections, buffers and windows exist from here on
            lap(runs[name], batch, everyone)
    yield {name: bytes_by_axis(run) for name, run in runs.items()}
    for number in range(job.rounds):
        there = list(runs) if number % 2 == 0 else list(reversed(runs))
        laps: dict[str, list[Lap]] = {name: [] for name in runs}
        for name in (*there, *reversed(there)):
            laps[name].append(lap(runs[name], batch, everyone))
        yield laps
    everyone.barrier()


def lap(run: Run, batch: Mapping[str, torch.Tensor], everyone: wire.Axis) -> Lap:
    """One step, begun together."""
    everyone.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    run.step(batch)
    run.placed.settle()  # what the step began belongs to it
    spent = everyone.collect([time.perf_counter() - wall, time.process_time() - cpu])
    return Lap(max(one[0] for one in spent), sum(one[1] for one in spent))


def bytes_by_axis(run: Run) -> dict[str, int]:
    """What the ledger counted in the last step of this rank, but for the few numbers that ranks tell each other."""
    found: dict[str, int] = {}
    for flow, traffic in run.ledger.traffic(run.number - 1).items():
        if flow.kind != "control":
            found[flow.axis] = found.get(flow.axis, 0) + traffic.bytes
    return found


# -- the forecast


def link(links: SlowLinks, took: Mapping[int, float]) -> Link:
    """What all-reduces of two sizes among all ranks say of a link, as `fourfold doctor` says it of loopback's."""
    flight, sent = links.round_trip / 2, 2 * (RANKS - 1) / RANKS * LARGE
    each = max(0.0, took[SMALL] / 2 - flight) / RANKS
    return Link("emulated", flight, sent / (took[LARGE] - took[SMALL]) / EFFICIENCY, each=each)


def cluster(link: Link) -> Cluster:
    """Eight nodes of one rank each on such links, which share the cores of this machine."""
    here = probe()
    part = min(1.0, here.devices_per_node / RANKS)
    device = dataclasses.replace(
        here.device,
        memory=int(here.device.memory * part),
        memory_bandwidth=here.device.memory_bandwidth * part,
        flops={dtype: peak * part for dtype, peak in here.device.flops.items()},
    )
    return Cluster(RANKS, 1, device, link, link)


def chosen(rows: Sequence[Row], traces: Traces, machine: Cluster) -> dict[str, Plan]:
    """The plans that the rows name, in order of mention; without rows, every grid."""
    names = dict.fromkeys(name for row in rows for name in (row.plan, *row.peers)) or GRIDS
    return {
        name: search(traces, machine)[0].plan if name == PLANNED else Plan.of({"placement": PLACEMENTS[name]})
        for name in names
    }


# -- the parent


def measure(
    links: SlowLinks, job: Job, tell: Callable[[str], None]
) -> tuple[dict[str, dict[str, int]], list[dict[str, list[Lap]]]]:
    """Run the ranks: bytes by plan and axis, and the laps of every round."""
    answers = run(links, PORT, lambda world: answered(world, job), job.rounds + 1)
    sent, rounds = next(answers), []
    for number, laps in enumerate(answers, 1):
        shown = {name: [round(lap.wall * 1e3) for lap in each] for name, each in laps.items()}
        tell(f"round {number}: milliseconds a step {shown}")
        rounds.append(laps)
    return sent, rounds


def run(links: SlowLinks, port: int, work: Work, count: int) -> Iterator[Any]:
    """The first rank's answers, so many.

    Raises:
        SystemExit: a rank failed; with what the first one said.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    about = [(index, links, port, work, theirs) for index in range(RANKS)]
    ranks = [context.Process(target=rank, args=one, daemon=True) for one in about]
    for one in ranks:
        one.start()
    theirs.close()
    try:
        for _ in range(count):
            answer = ours.recv()
            if isinstance(answer, str):
                raise SystemExit(f"slow_grid: {answer}")
            yield answer
        for one in ranks:
            one.join(timeout=30)
    except EOFError:
        raise SystemExit(f"slow_grid: ranks ended without a word: {[one.exitcode for one in ranks]}") from None
    finally:
        for one in ranks:
            one.kill()


def seconds(rounds: Sequence[dict[str, list[Lap]]], name: str) -> list[float]:
    """Of each round, the mean of the plan's two steps."""
    return [statistics.fmean(lap.wall for lap in one[name]) for one in rounds]


def judged(row: Row, rounds: Sequence[dict[str, list[Lap]]]) -> dict[str, Any]:
    """The row's ratio, its control and its verdict by the speed rule."""
    peer = min(row.peers, key=lambda name: statistics.median(seconds(rounds, name)))
    pairs = zip(seconds(rounds, peer), seconds(rounds, row.plan), strict=True)
    ratio = interval([theirs / ours for theirs, ours in pairs])
    control = interval([one[peer][1].wall / one[peer][0].wall for one in rounds])
    decides = control[1] <= 1 <= control[2] and (control[2] - control[1]) / 2 <= 0.03
    met = (ratio[0] >= row.times or ratio[2] >= row.times) and ratio[1] >= 0.97 * row.times
    return {
        "row": f"{row.plan} ÷ {peer} >= {row.times:g}",
        "ratio": ratio,
        f"{peer} ÷ {peer} (control)": control,
        "verdict": ("met" if met else "not met") if decides else "undecided: the control does not hold 1 within 3 %",
    }


def placed(forecasts: Mapping[str, Any], rounds: Sequence[dict[str, list[Lap]]]) -> dict[str, Any]:
    """Where the plan that is forecast to be the best comes in by what was measured."""
    measured = {name: statistics.median(seconds(rounds, name)) for name in forecasts}
    fastest = sorted(measured, key=lambda name: measured[name])
    best = min(forecasts, key=lambda name: forecasts[name].timing.total)
    place = fastest.index(best) + 1
    return {
        "row": f"the best grid by forecast is among the {NAMED} fastest of {len(measured)}",
        "forecast to be the best": best,
        "its place": place,
        "fastest": {name: round(1e3 * measured[name], 1) for name in fastest},
        "verdict": "met" if place <= NAMED else "not met",
    }


def report(
    plans: Mapping[str, Plan],
    sent: Mapping[str, dict[str, int]],
    rounds: Sequence[dict[str, list[Lap]]],
    forecasts: Mapping[str, Any],
    rate: float,
) -> list[dict[str, Any]]:
    """For each plan: what it moved, what that takes on the link, what was measured and what was forecast."""
    lines = []
    for name, plan in plans.items():
        step = statistics.median(seconds(rounds, name))
        said = forecasts[name]
        lines.append(
            {
                "plan": f"{name} ({plan})" if name == PLANNED else name,
                "step ms": round(step * 1e3, 1),
                "CPU ms, all ranks": round(1e3 * statistics.median(lap.cpu for one in rounds for lap in one[name]), 1),
                "bytes of a rank": sent[name],
                "ms on the link": round(8e3 * sum(sent[name].values()) / rate, 1),
                "forecast ms": round(said.timing.total * 1e3, 1),
                "forecast ÷ measured": round(said.timing.total / step, 3),
                "forecast bytes ÷ counted": round(said.ledger.sent() / max(1, sum(sent[name].values())), 4),
            }
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=tuple(SUITES), default="grid")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabits", type=float, default=200.0)
    parser.add_argument("--milliseconds", type=float, default=0.0, help="round trip")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--vocabulary", type=int, default=512)
    options = parser.parse_args()
    size = Size(options.layers, options.width, options.vocabulary)
    rate, round_trip = options.megabits * 1e6, options.milliseconds * 1e-3
    torch.set_num_threads(1)
    try:
        with SlowLinks(RANKS, rate, round_trip) as links:
            return compare(links, size, SUITES[options.suite], options.rounds)
    except SlowLinksError as error:
        print(f"slow_grid: {error}", file=sys.stderr)
        return 2


def compare(links: SlowLinks, size: Size, rows: Sequence[Row], rounds: int) -> int:
    """Measure the links, forecast, run, print; 1 if a row is not met."""
    told = {"links": str(links.measured())}
    print(told["links"], flush=True)
    subject = Subject(
        size.build, cross_entropy, {"tokens": size.tokens()[:2]}, RANKS, tokens_per_row=size.sequence, name="GPT"
    )
    took = next(run(links, PORT + 1, collectives, 1))
    traces, machine = Traces(subject), cluster(link(links, took))
    plans = chosen(rows, traces, machine)
    forecasts = {name: forecast(traces, machine, plan) for name, plan in plans.items()}
    began, before = time.perf_counter(), links.processor_seconds()
    sent, laps = measure(links, Job(size, plans, rounds), lambda line: print(line, flush=True))
    share = (links.processor_seconds() - before) / (time.perf_counter() - began)
    verdicts = [judged(row, laps) for row in rows] or [placed(forecasts, laps)]
    result = {
        **told,
        "ms of an all-reduce, by bytes": {nbytes: round(1e3 * spent, 2) for nbytes, spent in took.items()},
        "model": dataclasses.asdict(size) | {"tokens a step": RANKS * size.sequence},
        "plans": report(plans, sent, laps, forecasts, links.rate),
        "rows": verdicts,
        "rounds": rounds,
        "cores taken by the switch": round(share, 3),
        "packets dropped": links.dropped(),
        "machine": f"{os.cpu_count()} cores, torch {torch.__version__}",
    }
    print(json.dumps(result, indent=1, ensure_ascii=False))
    return int(any(one["verdict"] != "met" for one in verdicts))


if __name__ == "__main__":
    sys.exit(main())
