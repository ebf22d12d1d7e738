"""A model's parameters stay the same objects: whoever holds them, and what hangs on them, goes on."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold import wire
from fourfold.placement.refusals import PlacementError
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import Run, parallelize
from fourfold.wire.world import alone

SGD = OptimizerOptions(name="sgd", lr=0.5, weight_decay=0.0)
PLANS: list[dict[str, Any]] = [{}, {"data": 2}, {"z": 2, "shard": "optimizer"}, {"z": 2, "shard": "parameters"}]


class Net(nn.Module):
    """Blocks, whose first weight a plain list holds as well, and a head that is called by a partial function."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.held = [block.weight for block in self.blocks]
        self.called = partial(F.linear, weight=self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        for block, weight in zip(self.blocks, self.held, strict=True):
            x = F.linear(x, weight, block.bias).tanh()
        return self.called(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(batch["x"]).square().sum(), len(batch["x"])


def batch(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(number)).double()}


def _made() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double()


TEMPLATE = _made()


def net() -> Net:
    """The same weights on every rank: thread ranks share torch's generator."""
    return copy.deepcopy(TEMPLATE)


def serial(steps: int, hook: Any = None) -> dict[str, Tensor]:
    model = net()
    if hook is not None:
        model.head.weight.register_hook(hook)
    for number in range(steps):
        total, count = loss(model, batch(number))
        (total / count).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.5 * parameter.grad
                parameter.grad = None
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def ranks(placement: dict[str, Any], body: Any) -> list[Any]:
    size = placement.get("z", 1) * placement.get("data", 1)

    def one(world: wire.World) -> Any:
        return body(world, {"placement": {**placement, "precision": "fp64"}})

    return wire.threads.launch(size, one)


def near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name


def start(world: wire.World, plan: dict[str, Any], model: nn.Module | None = None) -> Run:
    return parallelize(model or net(), loss, SGD, plan, world=world, example=batch(0))


@pytest.mark.parametrize("placement", PLANS, ids=str)
def test_weights_in_plain_containers_train(placement: dict[str, Any]) -> None:
    def body(world: wire.World, plan: dict[str, Any]) -> dict[str, Tensor]:
        run = start(world, plan)
        for number in range(3):
            run.step(batch(number))
        return run.logical_state()

    near(ranks(placement, body)[0], serial(3))


@pytest.mark.parametrize("placement", PLANS, ids=str)
def test_hooks_and_attributes_of_parameters_stay(placement: dict[str, Any]) -> None:
    def halve(gradient: Tensor) -> Tensor:
        return gradient * 0.5

    def body(world: wire.World, plan: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
        model: Any = net()
        model.head.weight.register_hook(halve)
        model.head.weight.mark = "mine"
        run = start(world, plan, model)
        for number in range(2):
            run.step(batch(number))
        return run.logical_state(), model.head.weight.mark

    weights, mark = ranks(placement, body)[0]
    assert mark == "mine"
    near(weights, serial(2, halve))


@pytest.mark.parametrize("placement", PLANS, ids=str)
def test_a_backward_that_failed_leaves_nothing_to_the_next_step(placement: dict[str, Any]) -> None:
    def body(world: wire.World, plan: dict[str, Any]) -> dict[str, Tensor]:
        model = net()
        run = start(world, plan, model)
        run.step(batch(0))
        failing = [True]

        def fail(gradient: Tensor) -> None:
            if failing:
                raise MemoryError("no room")

        handle = model.blocks[0].register_forward_hook(
            lambda module, args, output: output.register_hook(fail) if output.requires_grad else None
        )
        model.blocks[1].bias.register_hook(lambda gradient: fail(gradient))
        with pytest.raises(MemoryError):
            run.step(batch(9))
        failing.clear()
        handle.remove()
        run.number = 1
        run.step(batch(1))
        return run.logical_state()

    near(ranks(placement, body)[0], serial(2))


@pytest.mark.parametrize("placement", PLANS, ids=str)
def test_a_backward_outside_of_steps_is_refused_and_leaves_nothing(placement: dict[str, Any]) -> None:
    def body(world: wire.World, plan: dict[str, Any]) -> dict[str, Tensor]:
        run = start(world, plan)
        run.step(batch(0))
        with run.gathered() as model, pytest.raises(PlacementError, match="backward outside of this run's steps"):
            loss(model, batch(5))[0].backward()
        run.step(batch(1))
        return run.logical_state()

    near(ranks(placement, body)[0], serial(2))


def test_weights_that_were_moved_away_are_named() -> None:
    run = start(alone(), {"placement": {"precision": "fp64"}})
    run.step(batch(0))
    run.model.float()
    with pytest.raises(PlacementError, match="was given other storage after the model was placed"):
        run.step(batch(1))
