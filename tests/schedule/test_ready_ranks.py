"""Ready mode across ranks: the numbers of one process whatever comes when, and groups that run the same sequence."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from fourfold import wire
from fourfold.schedule import Action, Ranks, Timeline
from fourfold.schedule.budget import Budget
from fourfold.schedule.figures import held
from fourfold.schedule.orders import message_driven
from fourfold.schedule.ready import Agree, Mode, drive_ready
from ranks import Processes
from schedule.test_ranks import Mail, Numbers, program_of, serial

MICROBATCHES = 6


def worker(axis: wire.Axis, name: str, steps: int, seed: int, agree: Agree | None = None) -> tuple[Numbers, list[str]]:
    """Numbers, and what this rank ran, of some steps with bodies that take a while of their own each."""
    draw = random.Random(seed)
    numbers = Numbers(axis.size - 1, lambda: time.sleep(draw.expovariate(1) * 0.004))
    program = program_of(name, axis.size, MICROBATCHES, axis.size)
    mode = Mode(Budget([most + 1 for most in held(program)]))
    if name == "message_driven":
        options = message_driven.Options(MICROBATCHES, limit=4)
        mode = message_driven.mode(message_driven.Shape(axis.size, MICROBATCHES, axis.size), options)
    ran: list[str] = []
    with wire.Links(axis) as links:
        machine = Ranks(program, axis.index, numbers.bodies, Mail(links, numbers.held))
        for _ in range(steps):
            ran += sequence(drive_ready(program, machine, mode, agree))
    assert {buffer.kind for buffer in numbers.held} == {"weight"}, "nothing is left over"
    return numbers, ran


def sequence(timeline: Timeline) -> list[str]:
    ran: list[tuple[float, Action]] = [(start, action) for action, start, _ in timeline if action.source is None]
    return [f"{action.kind[0].upper()}{action.microbatches.start}" for _, action in sorted(ran, key=lambda one: one[0])]


def train(world: wire.World, name: str, steps: int, seed: int) -> tuple[dict[int, float], float]:
    numbers, _ = worker(wire.Mesh(world, {"pipe": world.size})["pipe"], name, steps, seed + world.rank)
    return numbers.weights(), numbers.loss


def check(found: list[Any], size: int, steps: int) -> None:
    weights: dict[int, float] = {}
    for mine, _ in found:
        weights |= mine
    # Losses of micro-batches are added as they come: to the last digits, not to the bit.
    want, loss = serial(size, MICROBATCHES, steps)
    assert weights == want
    assert found[-1][1] == pytest.approx(loss, rel=1e-14)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "message_driven"])
def test_ranks_give_the_numbers_of_one_process(name: str, seed: int) -> None:
    check(wire.threads.launch(3, train, name, 2, 10 * seed), 3, 2)


def test_gloo_ranks_give_the_numbers_of_one_process(gloo: Processes) -> None:
    check(gloo(2, train, "1f1b", 2, 1), 2, 2)


def grouped(world: wire.World, seed: int, together: bool) -> tuple[dict[int, float], list[str]]:
    """Workers that are groups of two ranks each, whose bodies take their own time."""
    mesh = wire.Mesh(world, {"y": 2, "pipe": world.size // 2})
    group = mesh["y"]
    agree = lambda number: int(min(row[0] for row in group.collect([number])))  # noqa: E731
    numbers, ran = worker(mesh["pipe"], "1f1b", 2, 100 * seed + world.rank, agree if together else None)
    return numbers.weights(), ran


def groups(launch: Callable[..., list[Any]], workers: int, seed: int, together: bool) -> list[bool]:
    """Of each worker, whether its two ranks ran the same sequence; their weights are those of one process anyway."""
    found = launch(2 * workers, grouped, seed, together)
    want, _ = serial(workers, MICROBATCHES, 2)
    for stage in range(workers):
        for weights, _ in found[2 * stage : 2 * stage + 2]:
            assert weights == {stage: want[stage]}
    return [found[2 * stage][1] == found[2 * stage + 1][1] for stage in range(workers)]


def test_a_group_that_agrees_runs_one_sequence() -> None:
    assert all(all(groups(wire.threads.launch, 3, seed, together=True)) for seed in range(5))


def test_a_group_of_processes_that_agrees_runs_one_sequence(gloo: Processes) -> None:
    assert all(groups(gloo, 2, 1, together=True))


def test_a_group_that_does_not_agree_drifts_apart() -> None:
    """The control: the same delays, each rank on its own."""
    assert not all(all(groups(wire.threads.launch, 3, seed, together=False)) for seed in range(5))
