"""Window after window across ranks, each at its own pace: the numbers stay those of the whole in one process."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.plan import Plan
from fourfold.schedule import Action, Program, Ranks, ScheduleError, drive
from fourfold.schedule.action import PREDICT, UPDATE
from fourfold.schedule.budget import Budget
from fourfold.schedule.figures import held
from fourfold.schedule.laid import program_of
from fourfold.schedule.ready import Mode, drive_ready
from fourfold.schedule.work import B, F
from ranks import Processes
from schedule.recurrences import Scalars
from schedule.test_streams import NAMES, cases, stream, whole

WORKERS, UPDATES = 3, 9


class Mail:
    """Moves of scalars as messages."""

    def __init__(self, links: wire.Links, numbers: Scalars) -> None:
        self.links, self.numbers = links, numbers
        self.expect, self.poll, self.receive = links.expect, links.poll, links.receive

    def send(self, number: int, move: Action) -> None:
        value = self.numbers.values.pop((move.reads[0], move.where))
        self.links.send(move.worker, number, [torch.tensor([value], dtype=torch.float64)], move.reads[0].kind)

    def put(self, move: Action, content: tuple[Tensor | None, ...]) -> None:
        assert content[0] is not None
        self.numbers.values[move.writes[0], move.worker] = content[0].item()


def train(world: wire.World, name: str, seed: int, ready: bool) -> list[float]:
    """The weights that this rank's updates made, one window a step, bodies as late as they like."""
    axis = wire.Mesh(world, {"pipe": WORKERS})["pipe"]
    case, draw = cases(WORKERS)[name], random.Random(10 * seed + axis.index)
    numbers, line = Scalars(whole(case, WORKERS, UPDATES), case.momentum), stream(case, WORKERS)
    numbers.values = {place: value for place, value in numbers.values.items() if place[1] == axis.index}

    def body(action: Action) -> None:
        time.sleep(draw.expovariate(1) * 0.001)
        numbers.perform(action)

    drain = UPDATES - -(-WORKERS // case.m)
    with wire.Links(axis) as links:
        for begin in range(drain + 1):
            window = line.window(begin, UPDATES if begin == drain else begin + 1, last=begin == drain)
            assert set(numbers.values) == {place for place in window.given.items() if place[1] == axis.index}
            numbers.first, program = begin * case.m, window.program(WORKERS)
            machine = Ranks(program, axis.index, dict.fromkeys((F, B, UPDATE, PREDICT), body), Mail(links, numbers))
            step(program, machine, ready)
            values = numbers.values.items()
            numbers.values = {(window.handed[one], worker): value for (one, worker), value in values}
    return numbers.made[axis.index]


def step(program: Program, machine: Any, ready: bool) -> None:
    if ready:
        drive_ready(program, machine, Mode(Budget([most + 1 for most in held(program)])))
    else:
        drive(program, machine)


def want(name: str) -> list[list[float]]:
    case = cases(WORKERS)[name]
    program = whole(case, WORKERS, UPDATES)
    numbers = Scalars(program, case.momentum)
    drive(program, numbers)
    return numbers.made


@pytest.mark.parametrize("ready", [False, True], ids=["strict", "ready"])
@pytest.mark.parametrize("name", NAMES)
def test_windows_on_ranks_are_the_whole_in_one_process(name: str, ready: bool) -> None:
    assert wire.threads.launch(WORKERS, train, name, 1, ready) == want(name)


def test_windows_on_gloo_ranks_are_the_whole_in_one_process(gloo: Processes) -> None:
    assert gloo(WORKERS, train, "pipedream", 2, False) == want("pipedream")


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw", "spectrain"])
def test_training_refuses_what_it_cannot_drive(name: str) -> None:
    plan = Plan.of({"placement": {"pipe": 2}, "schedule": {"name": name, "microbatches": 2}})
    with pytest.raises(ScheduleError, match="never empties its pipeline: expected one whose step begins and ends"):
        program_of(plan)
