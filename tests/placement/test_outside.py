"""Weights that are read outside of their block, and what leaves a block beside its result: equal to serial."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold import wire
from fourfold.training.losses.cross_entropy import cross_entropy, summed
from fourfold.training.run import Run
from plain import VOCABULARY, Work, assert_equal, disturbed, gpt, lift_casts, on_threads, serial

LEVELS = ("none", "optimizer", "gradients", "parameters")
Loss = Callable[[Any, dict[str, Tensor]], Any]


def plan_of(level: str, ranks: int, recompute: str = "none", microbatches: int = 2) -> dict[str, Any]:
    cut = {"data": ranks} if level == "none" else {"z": ranks}
    placement = {**cut, "shard": level, "precision": "fp64", "recompute": recompute}
    return {"placement": placement, "schedule": {"microbatches": microbatches}}


# ---- weights


def penalised(model: Any, batch: dict[str, Tensor]) -> Any:
    """An L2 penalty over every weight; times the count, so that ranks' shares add up."""
    total, count = cross_entropy(model, batch)
    return total + 0.01 * count.double() * sum(parameter.square().sum() for parameter in model.parameters()), count


def penalised_first(model: Any, batch: dict[str, Tensor]) -> Any:
    """The weights are read before the model has run in this step."""
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    total, count = cross_entropy(model, batch)
    return total + 0.01 * count.double() * penalty, count


def compared(model: Any, batch: dict[str, Tensor]) -> Any:
    """The loss reads one weight of two blocks, one of them by a view."""
    total, count = cross_entropy(model, batch)
    first, second = model.blocks[0].mlp.expand.weight, model.blocks[1].mlp.expand.weight
    return total + 0.1 * count.double() * (first.t() @ second).square().mean(), count


class Lends(nn.Module):
    """A stack in which block 2 uses a weight of block 0, as a function of it and directly."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for number, block in enumerate(self.blocks):
            lent: Any = self.blocks[0]
            x = x + block(x + F.linear(x, lent[0].weight.t()) if number == 2 else x)
        return self.head(x)


@functools.cache
def lends() -> nn.Module:
    torch.manual_seed(0)
    return disturbed(Lends().double())


@functools.cache
def hooked() -> nn.Module:
    """A hook of a block runs when the block's weights have gone."""
    model: Any = copy.deepcopy(lends())
    model.blocks[1].register_forward_hook(lambda block, args, result: result * block[0].bias)
    return model


WEIGHTS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "penalty": (lambda: gpt(0.2), penalised),
    "penalty first": (lambda: gpt(0.2), penalised_first),
    "loss": (lambda: gpt(0.2), compared),
    "block": (lends, cross_entropy),
    "hook": (hooked, cross_entropy),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_weights_read_outside_of_their_block(kind: str, level: str, ranks: int) -> None:
    build, loss = WEIGHTS[kind]
    work = Work(build(), steps=2, loss=loss)
    expected = serial(work)
    for found in on_threads(work, plan_of(level, ranks)):
        assert_equal(found, expected)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_blocks_without_weights_of_their_own_still_recompute_and_draw(recompute: str) -> None:
    """A penalty over all weights leaves the blocks none; their dropout and recomputation stay what they were."""
    work = Work(gpt(0.2), steps=2, loss=penalised)
    expected = serial(work)
    for found in on_threads(work, plan_of("parameters", 3, recompute)):
        assert_equal(found, expected)


# ---- activations


class Aside(nn.Module):
    """Keeps a value beside its result; `aside` computes it, after or before the result."""

    def __init__(self, *, early: bool = False):
        super().__init__()
        self.linear, self.other, self.norm = nn.Linear(12, 12), nn.Linear(12, 12), nn.LayerNorm(12)
        self.early = early

    def forward(self, x: Tensor) -> Tensor:
        if self.early:
            self.aside = self._aside(x)
        result = x + self.linear(self.norm(x))
        if not self.early:
            self.aside = self._aside(x)
        return result

    def _aside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.other(torch.tanh(self.norm(x)) * self.norm.bias)).square().sum()


class OfWeights(Aside):
    """What it keeps depends on its weights alone."""

    def _aside(self, x: Tensor) -> Tensor:
        return (self.linear.weight @ self.other.weight).square().sum() * len(x)


class Cut(Aside):
    """What it keeps does not lead back to its input."""

    def _aside(self, x: Tensor) -> Tensor:
        return super()._aside(x.detach())


class Asides(Lends):
    def __init__(self, kind: type[Aside], *, early: bool):
        super().__init__()
        self.blocks = nn.ModuleList(kind(early=early) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@functools.cache
def asides(kind: type[Aside], early: bool) -> nn.Module:
    torch.manual_seed(0)
    return disturbed(Asides(kind, early=early).double())


def with_asides(model: Any, batch: dict[str, Tensor]) -> Any:
    total, count = cross_entropy(model, batch)
    return total + sum(block.aside for block in model.blocks), count


def asides_alone(model: Any, batch: dict[str, Tensor]) -> Any:
    """Backward enters no block by its result."""
    total, count = cross_entropy(model, batch)
    return total.detach() + sum(block.aside for block in model.blocks), count


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("loss", [with_asides, asides_alone])
@pytest.mark.parametrize("kind", [Aside, OfWeights, Cut])
def test_activations_that_leave_a_block_beside_its_result(
    kind: type[Aside], loss: Loss, early: bool, recompute: str
) -> None:
    work = Work(asides(kind, early), steps=2, loss=loss)
    expected = serial(work)
    for found in on_threads(work, plan_of("parameters", 3, recompute)):
        assert_equal(found, expected)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_router_logits_of_a_stock_mixture_of_experts(recompute: str) -> None:
    """Stock models hand inner activations out by hooks; the loss adds a penalty on them (the router's z-loss)."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    def loss(model: Any, batch: dict[str, Tensor]) -> Any:
        output = model(batch["tokens"], output_router_logits=True, use_cache=False)
        total, count = summed(output.logits, batch["targets"])
        return total + 0.1 * sum(logits.logsumexp(-1).square().sum() for logits in output.router_logits), count

    shape = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
    torch.manual_seed(0)
    config = MixtralConfig(**shape, **heads, max_position_embeddings=32)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()
    work = Work(disturbed(model), steps=2, loss=loss, prepare=lift_casts)
    expected = serial(work)
    for found in on_threads(work, plan_of("parameters", 3, recompute)):
        assert_equal(found, expected)


def test_a_compiled_block_is_entered_beside_its_result() -> None:
    work = Work(asides(Aside, early=False), steps=2, loss=asides_alone)
    expected = serial(work)

    def compiled(run: Run) -> None:
        run.placed.compile(backend="aot_eager", fullgraph=True)

    for found in on_threads(work, plan_of("parameters", 3), during=compiled):
        assert_equal(found, expected)


def test_what_backward_needs_must_not_change_in_place() -> None:
    """Torch does not check what somebody watches; the placement does, in its words."""

    class Spoils(Aside):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.linear(x))
            self.aside = hidden.square().sum()
            return x + hidden.mul_(2)

    torch.manual_seed(0)
    work = Work(Asides(Spoils, early=False).double(), steps=1, loss=with_asides)
    with pytest.raises(wire.RankFailed, match="modified by an inplace operation"):
        on_threads(work, plan_of("parameters", 2))


def test_a_gradient_by_torch_func_inside_a_block_is_refused_with_a_way_out() -> None:
    class Derives(Aside):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.func.grad(lambda y: torch.tanh(self.linear(y)).sum())(x)

    torch.manual_seed(0)
    work = Work(Asides(Derives, early=False).double(), steps=1)
    with pytest.raises(wire.RankFailed, match="calls torch.func.grad .* shard: gradients"):
        on_threads(work, plan_of("parameters", 2))
    expected = serial(work)
    for found in on_threads(work, plan_of("gradients", 2)):
        assert_equal(found, expected)
