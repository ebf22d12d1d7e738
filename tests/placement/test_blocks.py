"""Blocks that are no plain `x -> y`: found by somebody who tried to break the placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold import deferred, wire
from fourfold.placement.refusals import PlacementError
from fourfold.placement.seats import room
from fourfold.training.run import parallelize
from fourfold.training.values import ValuesError
from plain import SGD, Work, assert_equal, on_threads, serial

ZERO3 = {"z": 3, "shard": "parameters", "precision": "fp64"}
PLANS = [{"precision": "fp64"}, {"data": 3, "precision": "fp64"}, {**ZERO3, "shard": "optimizer"}, ZERO3]


class Stack(nn.Module):
    """Blocks between an embedding and a head; `join` combines a block's result with what went before."""

    def __init__(self, blocks: list[nn.Module], *, skips: bool = False):
        super().__init__()
        self.tokens = nn.Embedding(37, 12)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(12, 37)
        self.skips = skips

    def forward(self, tokens: Tensor) -> Tensor:
        x: Any = self.tokens(tokens)
        kept = []
        for number, block in enumerate(self.blocks):
            kept.append(x)
            x = block(x)
            if self.skips and number >= len(self.blocks) // 2:
                x = x + kept[len(self.blocks) - 1 - number]
        return self.head(x.hidden if isinstance(x, Boxed) else x)


def stack(kind: type[nn.Module], *, skips: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Stack([kind() for _ in range(4)], skips=skips).double()


@dataclass
class Boxed:
    """A result that is no tensor."""

    hidden: Tensor


class InPlace(nn.Sequential):
    """Changes its input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 12), nn.ReLU(inplace=True), nn.Linear(12, 12))

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input * 1.0)


class ChangesInput(nn.Module):
    """Begins with an in-place activation on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.linear = nn.ReLU(inplace=True), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.relu(x))


class TakesAndGivesBoxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Any) -> Boxed:
        hidden = x.hidden if isinstance(x, Boxed) else x
        return Boxed(hidden + torch.tanh(self.linear(hidden)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * torch.sigmoid(self.gate(x))


@pytest.mark.parametrize("kind", [InPlace, ChangesInput, TakesAndGivesBoxes, Residual])
@pytest.mark.parametrize("placement", PLANS)
def test_odd_blocks_equal_serial(kind: type[nn.Module], placement: dict[str, Any]) -> None:
    work = Work(stack(kind), steps=2)
    expected = serial(work)
    for found in on_threads(work, {"placement": placement, "schedule": {"microbatches": 2}}):
        assert_equal(found, expected)


@pytest.mark.parametrize("level", ["none", "parameters"])
def test_skips_between_blocks_have_the_same_bits_in_any_bucket(level: str) -> None:
    """A tensor with several users: nothing may change the order in which its gradients are added up."""
    work = Work(stack(Residual, skips=True).float(), rows=6, steps=2)
    cut = {"data": 3} if level == "none" else {"z": 3}
    plans = [{**cut, "shard": level, "bucket": bucket} for bucket in (0, 1 << 10, 1 << 30)]
    first, *others = [on_threads(work, {"placement": placement})[0] for placement in plans]
    for other in others:
        assert all(torch.equal(other.weights[name], tensor) for name, tensor in first.weights.items())


def test_recomputing_a_block_that_changes_its_input_is_refused() -> None:
    work = Work(stack(ChangesInput), steps=1)
    with pytest.raises(wire.RankFailed, match="changes an input or a buffer in place"):
        on_threads(work, {"placement": {"precision": "fp64", "recompute": "full"}})


def test_a_weight_that_is_not_real_is_refused_by_name() -> None:
    model = stack(Residual)
    model.register_parameter("c", nn.Parameter(torch.ones(2) * 1j))
    with pytest.raises(wire.RankFailed, match="c: expected a") as caught:
        on_threads(Work(model, steps=1), {"placement": {"data": 2}})
    assert isinstance(caught.value.__cause__, PlacementError)


def test_shared_buffers_stay_shared() -> None:
    model = stack(Residual)
    model.register_buffer("table", torch.ones(3))
    model.blocks[0].register_buffer("table", model.table)  # type: ignore[union-attr]
    work = Work(model.float(), steps=1)

    def body(world: wire.World) -> bool:
        placement = {"precision": "fp64"}
        run = parallelize(work.fresh(), work.loss, SGD, {"placement": placement}, world=world, example=work.batch(0))
        placed: Any = run.model
        return placed.table is placed.blocks[0].table

    assert wire.threads.launch(1, body) == [True]


def test_a_deferred_model_draws_its_own_weights_from_the_seed() -> None:
    def body(world: wire.World) -> dict[str, Tensor]:
        model = deferred(lambda: Stack([Residual() for _ in range(4)]))
        work = Work(model)
        run = parallelize(model, work.loss, SGD, {"placement": {"z": 3, "shard": "parameters"}}, world=world, seed=4)
        run.step(work.batch(0))
        return run.logical_state()

    first, *others = wire.threads.launch(3, body)
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


def test_weights_without_values_are_refused_with_the_remedy() -> None:
    with torch.device("meta"):
        model = Stack([Residual() for _ in range(4)])
    work = Work(model)
    with pytest.raises(ValuesError, match="fourfold.deferred"):
        parallelize(model, work.loss, SGD, example=work.batch(0))


@pytest.mark.parametrize("placement", [{"z": 3, "shard": "optimizer"}, {"z": 3, "shard": "parameters"}, {"data": 3}])
def test_a_gradient_codec_is_used_wherever_gradients_cross(placement: dict[str, Any]) -> None:
    work = Work(stack(Residual).float(), steps=1)
    plain = on_threads(work, {"placement": placement})[0]
    coded = on_threads(work, {"placement": placement, "wire": {"gradient": "bf16"}})[0]
    assert coded.measured == coded.predicted

    def sent(outcome: Any) -> int:
        return sum(entry.bytes for flow, entry in outcome.measured.items() if flow.kind == "gradient")

    # A plain gradient over all replicas takes every rank's numbers along, in fp32; each rank sends 2 (n - 1) / n of it.
    riding = 2 * 2 * room(3) * 4 // 3 if "data" in placement else 0
    assert sent(coded) * 2 == sent(plain) - riding
