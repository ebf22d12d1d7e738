"""Ready mode beside the fixed list: four gloo ranks whose stages take times that vary.

    python benchmarks/ready_mode.py
    python benchmarks/ready_mode.py --pairs 31

Every forward and backward sleeps for a time drawn from the exponential law (means of 10 and 20 ms), the same in all
arms of a round, another in each round. All arms may hold 2(p - r) micro-batches on worker r of p: 1F1B by its list
holds p - r of them, 1F1B with `ahead=2` all; ready mode takes the latter's list as its ranking. A round runs 1F1B, the
list with more ahead, ready mode and 1F1B again, in alternating order; 1F1B / 1F1B is the control. Printed are medians
of the rounds' ratios of wall time (of the slowest rank) with 95 % bootstrap intervals, beside those of virtual time. A
ratio above 1 means that ready mode is faster. The run decides nothing unless the control holds 1 within 3 %.
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
from importlib import import_module
from random import Random

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from speed import interval
from torch import Tensor

from fourfold import wire
from fourfold.schedule import Action, Program, Ranks, Shape, Timeline, Virtual, bind, drive, simulate, validate
from fourfold.schedule.action import BACKWARD, FORWARD, UPDATE
from fourfold.schedule.budget import Budget
from fourfold.schedule.ready import Mode, drive_ready

RANKS, MICROBATCHES, TARGET = 4, 16, 1.08
SECONDS = {FORWARD: 0.010, BACKWARD: 0.020}
"""Mean times of a stage and micro-batch."""
AHEAD = {"1f1b": 1, "ahead": 2, "ready": 2, "again": 1}
MODE = Mode(Budget([2 * (RANKS - worker) for worker in range(RANKS)]))


def program(ahead: int) -> Program:
    """1F1B, with so many times as many micro-batches in flight."""
    module, shape = import_module("fourfold.schedule.orders.1f1b"), Shape(RANKS, MICROBATCHES, RANKS)
    return validate(bind(module.order(shape, module.Options(MICROBATCHES, ahead)), RANKS), shape)


def seconds(number: int) -> Callable[[Action], float]:
    """How long each action takes in a round."""

    def cost(action: Action) -> float:
        mean = SECONDS.get(action.kind, 0.0)
        place = f"{number} {action.kind} {action.stage} {action.microbatches.start}"
        return mean * Random(place).expovariate(1.0) if mean else 0.0

    return cost


class Post:
    """Moves of a small tensor each."""

    def __init__(self, links: wire.Links) -> None:
        self.links, self.expect, self.poll, self.receive = links, links.expect, links.poll, links.receive
        self.tensor = torch.zeros(256)

    def send(self, number: int, move: Action) -> None:
        """Off it goes."""
        self.links.send(move.worker, number, [self.tensor], move.reads[0].kind)

    def put(self, move: Action, content: tuple[Tensor | None, ...]) -> None:
        """Nobody reads it."""


def predicted(number: int, programs: dict[str, Program]) -> dict[str, float]:
    """Virtual seconds of a round's arms."""
    cost = seconds(number)
    timelines = {arm: simulate(programs[arm], cost) for arm in ("1f1b", "ahead")}
    timelines["ready"] = drive_ready(programs["ready"], Virtual(RANKS, cost), MODE)
    return {arm: timeline.makespan for arm, timeline in timelines.items()}


def rank(index: int, port: int, pairs: int) -> None:
    """One of the processes."""
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    world = wire.join("gloo")
    axis = wire.Mesh(world, {"pipe": RANKS})["pipe"]
    programs = {arm: program(ahead) for arm, ahead in AHEAD.items()}
    now = [0]

    def body(action: Action) -> None:
        time.sleep(seconds(now[0])(action))

    rounds: list[dict[str, float]] = []
    with wire.Links(axis) as links:
        post = Post(links)
        bodies = {FORWARD: body, BACKWARD: body, UPDATE: body}
        machines = {arm: Ranks(one, index, bodies, post) for arm, one in programs.items()}

        def run(arm: str) -> Timeline:
            if arm == "ready":
                return drive_ready(programs[arm], machines[arm], MODE)
            return drive(programs[arm], machines[arm])

        for number in range(-1, pairs):  # the first is not counted
            now[0], found = number, {}
            for arm in list(AHEAD) if number % 2 else list(AHEAD)[::-1]:
                dist.barrier()
                began = time.perf_counter()
                run(arm)
                spent = torch.tensor([time.perf_counter() - began])
                dist.all_reduce(spent, op=dist.ReduceOp.MAX)
                found[arm] = float(spent)
            if number >= 0:
                rounds.append(found)
            if index == 0:
                print(
                    f"round {number + 1}: seconds { ({arm: round(spent, 3) for arm, spent in found.items()}) }",
                    flush=True,
                )
    if index == 0:
        report(rounds, [predicted(number, programs) for number in range(pairs)])
    world.leave()


def report(rounds: list[dict[str, float]], forecasts: list[dict[str, float]]) -> None:
    """Print the table."""
    gain = interval([(one["1f1b"] + one["again"]) / 2 / one["ready"] for one in rounds])
    control = interval([one["again"] / one["1f1b"] for one in rounds])
    decides = control[1] <= 1 <= control[2] and (control[2] - control[1]) / 2 <= 0.03
    met = (gain[0] >= TARGET or gain[2] >= TARGET) and gain[1] >= 0.97 * TARGET
    median = statistics.median
    result = {
        "rounds": len(rounds),
        "1F1B / ready mode, cap 2(p - r)": gain,
        "1F1B / 1F1B (control)": control,
        "1F1B with twice as many ahead / ready mode": interval([one["ahead"] / one["ready"] for one in rounds]),
        "the two ratios in virtual time": [
            median(one[arm] / one["ready"] for one in forecasts) for arm in ("1f1b", "ahead")
        ],
        "ready mode, measured / virtual": median(
            a["ready"] / b["ready"] for a, b in zip(rounds, forecasts, strict=True)
        ),
        "target": TARGET,
        "verdict": ("met" if met else "not met") if decides else "undecided: the control does not hold 1 within 3 %",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }
    print(json.dumps(result, indent=1))


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=17)
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank, args=(port, arguments.pairs), nprocs=RANKS)


if __name__ == "__main__":
    main()
