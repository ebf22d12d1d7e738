"""What cannot be a pipeline is refused before anything runs, with the smallest change that would do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.placement.pipe.cuts import balanced
from fourfold.placement.pipe.part import Part
from fourfold.placement.refusals import PlacementError
from fourfold.plan import Plan, PlanError
from fourfold.schedule import ScheduleError
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.run import parallelize
from plain import SGD, gpt


def refusal(model: nn.Module, plan: dict[str, Any], example: dict[str, Tensor], loss: Any) -> str:
    def body(world: wire.World) -> str:
        with pytest.raises((PlacementError, ScheduleError)) as caught:
            parallelize(model, loss, SGD, plan, world=world, example=example)
        return str(caught.value)

    first, *others = wire.threads.launch(Plan.of(plan).world, body)
    assert all(other == first for other in others)
    return first


def squared(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (model(batch["x"]) ** 2).sum(), len(batch["x"])


def plan(pipe: int, microbatches: int, name: str = "1f1b", **placement: Any) -> dict[str, Any]:
    return {"placement": {"pipe": pipe, **placement}, "schedule": {"name": name, "microbatches": microbatches}}


def refused(plan: dict[str, Any], model: nn.Module | None = None) -> str:
    return refusal(model or nn.Sequential(*layers(3)), plan, {"x": torch.randn(4, 4)}, squared)


def layers(count: int) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


def test_fewer_microbatches_than_workers() -> None:
    found = refused(plan(4, 3))
    assert "4 workers want at least as many micro-batches" in found and "try 4, or plan.placement.pipe: 3" in found
    found = refused(plan(2, 5, "interleaved"))
    assert "try 4" in found or "try 6" in found


def test_more_stages_than_layers() -> None:
    assert "4 stages want at least as many layers, found 3; try 3 stages" in refused(plan(4, 4))


def test_one_worker_has_no_pipeline() -> None:
    with pytest.raises(PlanError, match="accumulate runs on one worker, and plan.placement.pipe is 2"):
        Plan.of({"placement": {"pipe": 2}})


@pytest.mark.parametrize(
    ("name", "pipe", "kinds"),
    [("bpipe", 4, "evict, load"), ("pipeoffload", 2, "offload, reload"), ("chronospipe", 2, "recompute")],
)
def test_schedules_that_are_only_simulated(name: str, pipe: int, kinds: str) -> None:
    found = refused(plan(pipe, 4, name))
    assert f"schedule {name} wants actions that training cannot run yet, only simulate: {kinds}; try 1f1b" in found


@pytest.mark.parametrize("cut", [[1, 1], [3], [2, 2], [1, 1, 1]])
def test_a_cut_that_leaves_layers_out(cut: list[int]) -> None:
    found = refused(plan(2, 2, cut=cut))
    assert "expected 2 numbers of at least 1 that add up to the model's 3 layers (0, 1, 2)" in found


class Normed(nn.Module):
    """One batch norm after two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layers(2)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.norm(self.a(x))))


def test_state_that_layers_of_two_stages_share() -> None:
    found = refused(plan(2, 2, cut=[2, 2]), Normed())
    assert "reads what an earlier layer made or changed inside (state that they share)" in found


class Looks(nn.Module):
    """Its code looks at what a layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layers(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x) if x.sum() > 0 else self.b(-x)


def test_code_that_looks_at_values() -> None:
    assert "cannot run again on another stage: __bool__ after a" in refused(plan(2, 2), Looks())


class Keeps(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        self.kept = input * 2
        return super().forward(self.kept)


class Leaky(nn.Module):
    """A layer hands on what is no result of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Keeps(4, 4)
        self.b, self.c, self.d = layers(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x)) + self.a.kept))


def test_a_tensor_that_leaves_a_layer_by_another_way() -> None:
    assert "expected cuts before layers [3], found 1" in refused(plan(2, 2, cut=[1, 3]), Leaky())


def parts(model: nn.Module, loss: Any, example: dict[str, Tensor]) -> list[Part]:
    """Each worker's."""

    def body(world: wire.World) -> Part:
        settings = plan(2, 2, precision="fp64")
        run = parallelize(copy.deepcopy(model), loss, SGD, settings, world=world, example=example)
        assert run.placed.part is not None
        return run.placed.part

    return wire.threads.launch(2, body)


def test_where_only_one_cut_is_possible_it_is_taken() -> None:
    assert parts(Leaky().double(), squared, {"x": torch.ones(2, 4)})[0].bounds == (0, 3, 4)


def test_cuts_are_the_best_of_all() -> None:
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    for stages in range(1, 6):
        bounds = balanced(costs, stages)
        best = min(slowest(costs, other) for other in _all(len(costs), stages))
        assert slowest(costs, bounds) == best
    assert balanced([1.0] * 6, 3) == (0, 2, 4, 6)
    assert balanced(costs, 2, sizes=[1.0] * 8, caps=[2.0, 8.0]) == (0, 2, 8)
    with pytest.raises(PlacementError, match="no way to cut 8 layers into 2 stages holds what they may hold"):
        balanced(costs, 2, sizes=[1.0] * 8, caps=[2.0, 5.0])


def slowest(costs: Sequence[float], bounds: Sequence[int]) -> float:
    return max(sum(costs[first:last]) for first, last in zip(bounds, bounds[1:], strict=False))


def _all(count: int, stages: int, first: int = 0) -> list[tuple[int, ...]]:
    if stages == 1:
        return [(first, count)]
    return [(first, *rest) for at in range(first + 1, count - stages + 2) for rest in _all(count, stages - 1, at)]


def test_the_weights_of_a_gpt_are_each_on_the_stages_that_read_them() -> None:
    first, second = parts(gpt(0.0), cross_entropy, {"tokens": torch.zeros(1, 8, dtype=torch.int64)})
    mine, theirs = first.held(0), second.held(1)
    assert mine | theirs == dict(gpt(0.0).named_parameters()).keys()
    assert mine & theirs == {"tokens.weight"} == set(first.shared) == set(second.copied) and not first.copied
