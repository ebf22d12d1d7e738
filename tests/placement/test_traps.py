"""Traps that earlier attempts fell into, one test each."""

from __future__ import annotations

import functools
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.placement.precision import computes_bf16
from fourfold.placement.refusals import PlacementError
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import RunError, parallelize
from fourfold.training.tally import StepError
from plain import SGD, Outcome, Work, assert_equal, gpt, on_threads, serial, worst

ZERO3 = {"z": 3, "shard": "parameters", "precision": "fp64"}
LEVELS = [{"data": 3, "precision": "fp64"}, {**ZERO3, "shard": "optimizer"}, ZERO3, {**ZERO3, "recompute": "full"}]


def keep_three(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("contract.weight", "contract.bias", "norm.weight")))


@pytest.mark.parametrize("placement", LEVELS)
def test_frozen_weights_are_needed_after_the_last_trained_one_has_its_gradient(placement: dict[str, Any]) -> None:
    """As under LoRA: the first linear of a block is frozen, so its weight is read when all gradients are there."""
    work = Work(gpt(0.2), prepare=keep_three)
    expected = serial(work)
    for found in on_threads(work, {"placement": placement, "schedule": {"microbatches": 2}}):
        assert_equal(found, expected)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("placement", LEVELS)
def test_freezing_after_placing_is_refused_before_anything_is_updated(placement: dict[str, Any], trained: bool) -> None:
    name = "blocks.1.mlp.expand.weight"
    work = Work(gpt(), prepare=lambda model: model.get_parameter(name).requires_grad_(trained))  # type: ignore[arg-type]

    def body(world: wire.World) -> None:
        run = parallelize(work.fresh(), work.loss, SGD, {"placement": placement}, world=world, example=work.batch(0))
        run.step(work.batch(0))
        before = run.logical_state()
        run.model.get_parameter(name).requires_grad_(not trained)
        with pytest.raises(PlacementError, match=f"^{name}: requires_grad has changed"):
            run.step(work.batch(1))
        assert worst(run.logical_state(), before) == 0

    wire.threads.launch(3, body)


class Shy(nn.Module):
    """A model with an unused weight, a 0-dim weight, and a block that some batches do not touch."""

    def __init__(self, plain: nn.Module):
        super().__init__()
        self.plain = plain
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.unused = nn.Linear(3, 5).double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.plain(tokens) * self.scale


@functools.cache
def shy() -> Shy:
    torch.manual_seed(3)
    return Shy(gpt(0.2))


@pytest.mark.parametrize("placement", LEVELS)
def test_unused_and_scalar_weights(placement: dict[str, Any]) -> None:
    work = Work(shy())
    expected = serial(work)
    for found in on_threads(work, {"placement": placement}):
        assert_equal(found, expected)


@pytest.mark.parametrize("placement", LEVELS)
def test_untied_head_lies_after_the_blocks(placement: dict[str, Any]) -> None:
    work = Work(gpt(0.2, tied=False))
    expected = serial(work)
    for found in on_threads(work, {"placement": placement}):
        assert_equal(found, expected)


@pytest.mark.parametrize("clip", [(0.05, 2.0), (0.01, inf), (1e9, inf)])
@pytest.mark.parametrize("placement", [LEVELS[0], ZERO3, {**ZERO3, "z": 2, "data": 2}])
def test_every_logical_element_counts_once_in_the_norm(placement: dict[str, Any], clip: tuple[float, float]) -> None:
    options = OptimizerOptions(name="sgd", lr=0.3, clip=clip[0], clip_norm=clip[1])
    work = Work(gpt(), steps=2, options=options)
    expected = serial(work)
    for found in on_threads(work, {"placement": placement}):
        assert_equal(found, expected)


def test_weights_that_differ_between_ranks_are_named() -> None:
    work = Work(gpt())

    def body(world: wire.World) -> None:
        model = work.fresh()
        if world.rank == 1:
            next(model.parameters()).data[0, 0] += 1
        parallelize(model, work.loss, SGD, {"placement": {"data": 2}}, world=world, example=work.batch(0))

    with pytest.raises(wire.RankFailed, match=r"rank 1 holds other values of 'tokens.weight'"):
        wire.threads.launch(2, body)


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    def body(world: wire.World) -> None:
        parallelize(gpt(), Work(gpt()).loss, SGD, {"placement": {"data": 4}}, world=world)

    with pytest.raises(wire.RankFailed, match="needs 4 ranks, found 2") as caught:
        wire.threads.launch(2, body)
    assert isinstance(caught.value.__cause__, RunError)


def test_a_loss_that_is_not_finite_stops_every_rank_before_the_update() -> None:
    work = Work(gpt())

    def body(world: wire.World) -> dict[str, Tensor]:
        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
            total, count = work.loss(model, batch)
            return total * (inf if world.rank == 1 else 1), count

        run = parallelize(work.fresh(), loss, SGD, {"placement": ZERO3}, world=world, example=work.batch(0))
        before = run.logical_state()
        with pytest.raises(StepError, match="not finite on rank 1"):
            run.step(work.batch(0))
        assert worst(run.logical_state(), before) == 0
        return before

    assert len(wire.threads.launch(3, body)) == 3


def test_a_batch_in_which_nothing_counts_is_refused() -> None:
    work = Work(gpt())

    def body(world: wire.World) -> None:
        batch = work.batch(0)
        batch["targets"].fill_(-100)
        run = parallelize(work.fresh(), work.loss, SGD, {"placement": {"data": 2}}, world=world)
        with pytest.raises(StepError, match="no token counted"):
            run.step(batch)

    wire.threads.launch(2, body)


# ---- mixed precision


def bf16_by_hand(work: Work) -> Outcome:
    """One process: master weights in fp32, rounded to bf16 for every use, gradients in fp32."""
    outcome = Outcome()
    plain, master = work.fresh(), {}
    for name, parameter in plain.named_parameters():
        master[name] = parameter.detach().clone().float()
    for step in range(work.steps):
        for name, parameter in plain.named_parameters():
            parameter.data.copy_(master[name].bfloat16())
            parameter.grad = None
        total, count = work.loss(plain, work.batch(step))
        total.backward()
        outcome.losses.append(float(total.detach()) / float(count))
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            master[name] -= work.options.lr * parameter.grad / float(count)
    outcome.weights = master
    return outcome


PLAIN_SGD = OptimizerOptions(name="sgd", lr=0.3, weight_decay=0.0)


@pytest.mark.parametrize(
    "placement", [{}, {"data": 3}, {"z": 3, "shard": "optimizer"}, {"z": 3, "shard": "parameters"}]
)
def test_bf16_rests_and_moves_in_bf16_over_fp32_masters(placement: dict[str, Any]) -> None:
    """One rank equals the rounding done by hand to fp32; many differ by the rounding of gradients on the wire."""
    if computes_bf16(torch.device("cpu")):
        tolerance = 0.05  # compute in bf16, too
    else:
        tolerance = 2e-6 if not placement else 2e-2
    work = Work(gpt(dtype=torch.float32), options=PLAIN_SGD)
    expected = bf16_by_hand(work)
    for found in on_threads(work, {"placement": {**placement, "precision": "bf16"}}):
        for mine, plain in zip(found.losses, expected.losses, strict=True):
            assert abs(mine - plain) <= tolerance * abs(plain)
        assert worst(found.weights, expected.weights) <= tolerance
        assert all(weight.dtype == torch.float32 for weight in found.weights.values())
        assert found.measured == found.predicted


def test_bf16_halves_the_bytes() -> None:
    work = Work(gpt(dtype=torch.float32), steps=1)
    sent = {}
    for precision in ("fp32", "bf16"):
        placement = {"z": 3, "shard": "parameters", "precision": precision}
        traffic = on_threads(work, {"placement": placement})[0].measured
        sent[precision] = sum(entry.bytes for flow, entry in traffic.items() if flow.kind != "control")
    assert sent["bf16"] * 2 == sent["fp32"]


# ---- compiled blocks


def test_a_compiled_block_has_no_graph_break_and_the_same_numbers() -> None:
    work = Work(gpt(0.2), steps=2)
    expected = serial(work)

    def body(world: wire.World) -> Outcome:
        run = parallelize(work.fresh(), work.loss, SGD, {"placement": ZERO3}, world=world, example=work.batch(0))
        run.placed.compile(backend="aot_eager", fullgraph=True)
        outcome = Outcome()
        for step in range(work.steps):
            result = run.step(work.batch(step))
            outcome.losses.append(result.loss)
            outcome.norms.append(result.gradient_norm)
        outcome.weights, outcome.gradients = run.logical_state(), run.logical_gradients()
        outcome.predicted, outcome.measured = run.forecast().traffic(), run.ledger.traffic(work.steps - 1)
        return outcome

    for found in wire.threads.launch(3, body):
        assert_equal(found, expected)
