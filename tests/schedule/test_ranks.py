"""One worker a rank: the same program gives the same numbers, whoever sends late; compute never waits for a send."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.schedule import Action, Buffer, Inline, Program, Ranks, ScheduleError, Shape, bind, drive, validate
from fourfold.wire import formulas
from ranks import Processes, ProcessFailed

Launch = Callable[..., list[Any]]


@pytest.fixture(params=["threads", "gloo"])
def launch(request: pytest.FixtureRequest) -> Launch:
    return wire.threads.launch if request.param == "threads" else request.getfixturevalue("gloo")


def program_of(name: str, stages: int, microbatches: int, workers: int) -> Program:
    shape = Shape(stages, microbatches, workers)
    module = import_module(f"fourfold.schedule.orders.{name}")
    return validate(bind(module.order(shape, module.Options(microbatches)), workers), shape)


class Numbers:
    """Stages that multiply by a weight, on rows whose number differs from micro-batch to micro-batch.

    What an action writes is worked out from what it reads alone, so that a program gives the same numbers wherever
    and whenever its actions run: that is what is tested.
    """

    def __init__(self, last: int, pause: Callable[[], None] = lambda: None) -> None:
        self.held: dict[Buffer, Tensor] = {}
        self.last, self.pause = last, pause
        self.loss = 0.0
        self.bodies = {"forward": self.forward, "backward": self.backward, "update": self.update}

    def weight(self, stage: int) -> Tensor:
        start = torch.tensor(1.0 + 0.1 * stage, dtype=torch.float64)
        return self.held.setdefault(Buffer("weight", stage), start)

    def forward(self, action: Action) -> None:
        self.pause()
        stage, batch = action.stage, action.microbatches.start
        rows = torch.arange(1.0, batch + 3.0, dtype=torch.float64)
        given = self.held.pop(Buffer("activation", stage - 1, batch)) if stage else rows
        self.held[Buffer("stash", stage, batch)] = given
        out = (given * self.weight(stage)).sin()
        if stage == self.last:
            self.loss += out.sum().item()
        else:
            self.held[Buffer("activation", stage, batch)] = out

    def backward(self, action: Action) -> None:
        self.pause()
        stage, batch = action.stage, action.microbatches.start
        given = self.held.pop(Buffer("stash", stage, batch))
        slope = (given * self.weight(stage)).cos()
        after = Buffer("activation-gradient", stage + 1, batch)
        slope = slope * (self.held.pop(after) if stage < self.last else 1.0)
        self.held[Buffer("gradient", stage, batch)] = (slope * given).sum()
        if stage:
            self.held[Buffer("activation-gradient", stage, batch)] = slope * self.weight(stage)

    def update(self, action: Action) -> None:
        gradients = [self.held.pop(Buffer("gradient", action.stage, batch)) for batch in action.microbatches]
        old = self.held.pop(Buffer("weight", action.stage))
        self.held[Buffer("weight", action.stage)] = old - 0.01 * torch.stack(gradients).sum()

    def weights(self) -> dict[int, float]:
        return {buffer.stage: value.item() for buffer, value in self.held.items() if buffer.kind == "weight"}


class Mail:
    """Moves as messages of links."""

    def __init__(self, links: wire.Links, held: dict[Buffer, Tensor]) -> None:
        self.links, self.held = links, held
        self.expect = links.expect

    def send(self, number: int, move: Action) -> None:
        self.links.send(move.worker, number, [self.held.pop(move.reads[0])], move.reads[0].kind)

    def poll(self) -> wire.Message | None:
        return self.links.poll()

    def receive(self) -> wire.Message:
        return self.links.receive()

    def put(self, move: Action, content: tuple[Tensor | None, ...]) -> None:
        (value,) = content
        assert value is not None
        self.held[move.writes[0]] = value


def serial(stages: int, microbatches: int, steps: int) -> tuple[dict[int, float], float]:
    numbers = Numbers(stages - 1)
    program = program_of("accumulate", stages, microbatches, 1)
    for _ in range(steps):
        drive(program, Inline(numbers.bodies))
    return numbers.weights(), numbers.loss


def train(
    world: wire.World, name: str, stages: int, microbatches: int, steps: int, delays: int | None
) -> tuple[dict[int, float], float, int, int]:
    """(weights, loss, bytes sent, bytes by the formula) of this rank."""
    axis = wire.Mesh(world, {"pipe": world.size})["pipe"]
    draw = random.Random(None if delays is None else 10 * delays + world.rank)
    numbers = Numbers(stages - 1, lambda: None if delays is None else time.sleep(draw.random() * 0.01))
    program = program_of(name, stages, microbatches, world.size)
    with wire.Links(axis) as links:
        machine = Ranks(program, axis.index, numbers.bodies, Mail(links, numbers.held))
        for step in range(steps):
            axis.ledger.begin(step)
            timeline = drive(program, machine)
            ran = [action for action, _, _ in timeline]
            assert ran == [one for one in program.actions if axis.index in (one.worker, one.source)]
            assert all(start <= end for _, start, end in timeline)
    assert {buffer.kind for buffer in numbers.held} == {"weight"}, "nothing is left over"
    out = [action for action in program.actions if action.source == axis.index]
    want = sum(formulas.message([((action.microbatches.start + 2,), 8)]) for action in out) * steps
    return numbers.weights(), numbers.loss, axis.ledger.sent(), want


@pytest.mark.parametrize("delays", [None, 1, 2], ids=["at once", "delays 1", "delays 2"])
@pytest.mark.parametrize(
    ("name", "size", "microbatches"),
    [("gpipe", 2, 4), ("1f1b", 2, 5), ("gpipe", 3, 3), ("1f1b", 4, 6), ("1f1b", 3, 2)],
)
def test_thread_ranks_give_the_numbers_of_one_process(name: str, size: int, microbatches: int, delays: int) -> None:
    check(wire.threads.launch(size, train, name, size, microbatches, 3, delays), size, microbatches)


@pytest.mark.parametrize("delays", [None, 1], ids=["at once", "delays 1"])
@pytest.mark.parametrize(("name", "microbatches"), [("gpipe", 4), ("1f1b", 5)])
def test_gloo_ranks_give_the_numbers_of_one_process(gloo: Processes, name: str, microbatches: int, delays: int) -> None:
    check(gloo(2, train, name, 2, microbatches, 3, delays), 2, microbatches)


def check(found: list[tuple[dict[int, float], float, int, int]], size: int, microbatches: int) -> None:
    weights: dict[int, float] = {}
    for mine, _, metered, formula in found:
        weights |= mine
        assert metered == formula
    assert (weights, found[-1][1]) == serial(size, microbatches, 3)


def test_an_order_without_moves_needs_nobody() -> None:
    numbers, program = Numbers(1), program_of("accumulate", 2, 3, 1)
    drive(program, Ranks(program, 0, numbers.bodies, Scripted()))
    assert (numbers.weights(), numbers.loss) == serial(2, 3, 1)


# ---- compute never waits for a transfer that it does not need


def late_receiver(world: wire.World) -> dict[int, float]:
    """Rank 1 takes nothing until rank 0 has run its last forward."""
    axis = wire.Mesh(world, {"pipe": 2})["pipe"]
    numbers, program = Numbers(1), program_of("gpipe", 2, 4, 2)

    def forward(action: Action) -> None:
        numbers.forward(action)
        if axis.index == 0 and action.microbatches.start == 3:
            axis.barrier()

    if axis.index == 1:
        axis.barrier()
    with wire.Links(axis) as links:
        drive(program, Ranks(program, axis.index, numbers.bodies | {"forward": forward}, Mail(links, numbers.held)))
    return numbers.weights()


def test_forwards_run_while_nobody_takes_what_they_send(launch: Launch) -> None:
    first, second = launch(2, late_receiver)
    assert first | second == serial(2, 4, 1)[0]


class Scripted:
    """Nothing comes unless the test puts it there; waiting for nothing is an error."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.coming: deque[tuple[int, int, str]] = deque()

    def expect(self, source: int, count: int) -> None:
        self.log.append(f"expect {count} of {source}")

    def send(self, number: int, move: Action) -> None:
        self.log.append(f"send {move.reads[0]}")

    def poll(self) -> tuple[int, int, str] | None:
        return self.coming.popleft() if self.coming else None

    def receive(self) -> tuple[int, int, str]:
        self.log.append("wait")
        if not self.coming:
            raise LookupError("nobody is there")
        return self.coming.popleft()

    def put(self, move: Action, content: str) -> None:
        self.log.append(f"put {content}")


def scripted(worker: int, microbatches: int = 2) -> tuple[Scripted, Ranks[str], Program, dict[str, int]]:
    post, program = Scripted(), program_of("1f1b", 2, microbatches, 2)
    run = lambda action: post.log.append(f"run {action.kind} {action.microbatches.start}")  # noqa: E731
    machine = Ranks(program, worker, dict.fromkeys(("forward", "backward", "update"), run), post)
    numbers = {str(move.reads[0]): number for number, move in enumerate(program.actions) if move.source is not None}
    return post, machine, program, numbers


def test_what_came_is_taken_before_the_next_body_and_kept_until_it_is_wanted() -> None:
    post, machine, program, numbers = scripted(1)
    second = "activation of stage 0, micro-batch 1"
    first = second.replace("1", "0")
    post.coming.extend([(0, numbers[second], "B"), (0, numbers[first], "A")])
    drive(program, machine)
    assert post.log == [
        "expect 2 of 0",
        "wait",  # B comes first and is kept, since the link's moves run in their order
        "wait",
        "put A",
        "put B",
        "run forward 0",
        "run backward 0",
        "send activation-gradient of stage 1, micro-batch 0",
        "run forward 1",
        "run backward 1",
        "send activation-gradient of stage 1, micro-batch 1",
        "run update 0",
    ]


def test_what_comes_while_a_body_runs_is_taken_before_the_next_one() -> None:
    post, program = Scripted(), program_of("gpipe", 2, 2, 2)
    gradient = next(number for number, one in enumerate(program.actions) if one.source == 1)

    def forward(action: Action) -> None:
        post.log.append(f"run forward {action.microbatches.start}")
        if action.microbatches.start == 0:
            post.coming.append((1, gradient, "early"))

    with pytest.raises(LookupError):
        drive(program, Ranks(program, 0, {"forward": forward, "backward": forward, "update": forward}, post))
    assert post.log.index("run forward 0") < post.log.index("put early") < post.log.index("run forward 1")


def test_with_nothing_to_run_it_waits_and_says_for_what_in_vain() -> None:
    post, machine, program, _ = scripted(0)
    with pytest.raises(LookupError, match="nobody is there") as caught:
        drive(program, machine)
    assert post.log == [
        "expect 2 of 1",
        "run forward 0",
        "send activation of stage 0, micro-batch 0",
        "run forward 1",
        "send activation of stage 0, micro-batch 1",
        "wait",
    ]
    assert caught.value.__notes__ == [
        "during move of activation-gradient of stage 1, micro-batch 0 from worker 1 to worker 0"
    ]


def test_a_move_is_timed_from_its_issue_to_its_arrival() -> None:
    post, machine, program, numbers = scripted(1)
    now: list[float] = []

    def slow() -> tuple[int, int, str]:
        now.append(time.perf_counter())
        return Scripted.receive(post)

    post.receive = slow  # type: ignore[method-assign]
    post.coming.extend((0, number, "") for name, number in numbers.items() if "gradient" not in name)
    timeline = drive(program, machine)
    first = numbers["activation of stage 0, micro-batch 0"]
    start, end = timeline.starts[first], timeline.ends[first]
    assert start is not None and end is not None
    assert start <= now[0] <= end


@pytest.mark.parametrize(
    ("source", "name", "says"),
    [
        (0, "activation-gradient of stage 1, micro-batch 0", "worker 0 sent action .* which is not, or no more"),
        (7, "activation of stage 0, micro-batch 0", "worker 7 sent action"),
        (0, "none", "worker 0 sent action -1 .none that there is."),
    ],
    ids=["our own", "another's", "none"],
)
def test_a_message_of_another_program_is_refused(source: int, name: str, says: str) -> None:
    post, machine, program, numbers = scripted(1)
    post.coming.append((source, numbers.get(name, -1), ""))
    with pytest.raises(ScheduleError, match=says):
        drive(program, machine)


def test_a_message_that_comes_twice_is_refused() -> None:
    post, machine, program, numbers = scripted(1)
    post.coming.extend([(0, numbers["activation of stage 0, micro-batch 0"], "")] * 2)
    with pytest.raises(ScheduleError, match="no more, a move between the two"):
        drive(program, machine)


def test_a_kind_without_a_body_is_refused() -> None:
    program = program_of("gpipe", 2, 2, 2)
    with pytest.raises(ScheduleError, match="no body runs forward of stage 0"):
        drive(program, Ranks(program, 0, {}, Scripted()))


# ---- what goes wrong has a name


def one_fails(world: wire.World) -> None:
    axis = wire.Mesh(world, {"pipe": 2})["pipe"]
    numbers, program = Numbers(1), program_of("1f1b", 2, 4, 2)

    def backward(action: Action) -> None:
        if (axis.index, action.microbatches.start) in ((0, 0), (1, 1)):
            axis.barrier()  # the gradient of micro-batch 0 has arrived
        if (axis.index, action.microbatches.start) == (1, 1):
            raise ArithmeticError("overflow")
        numbers.backward(action)

    with wire.Links(axis) as links:
        drive(program, Ranks(program, axis.index, numbers.bodies | {"backward": backward}, Mail(links, numbers.held)))


def test_a_body_that_raises_names_its_action_and_so_does_who_waits_for_it(gloo: Processes) -> None:
    with pytest.raises(ProcessFailed) as caught:
        gloo(2, one_fails)
    assert "during backward of stage 1, micro-batch 1, worker 1" in caught.value.reports[1]
    waits = caught.value.reports[0]
    assert "a message from rank 1 on axis pipe (ranks 0, 1) failed" in waits
    assert "during move of activation-gradient of stage 1, micro-batch 1 from worker 1 to worker 0" in waits
    with pytest.raises(wire.RankFailed, match="rank 1 of 2 failed: ArithmeticError: overflow") as threads:
        wire.threads.launch(2, one_fails)
    assert threads.value.__cause__ is not None
    assert threads.value.__cause__.__notes__ == ["during backward of stage 1, micro-batch 1, worker 1"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("messages")]
