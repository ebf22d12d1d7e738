"""Losses that call parts of the model themselves, and recompute: what they see is whole, or they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold import wire
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor import trial
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from plain import VOCABULARY, Work, assert_equal, disturbed, on_threads, serial

from .grouped import Block, Sizes

Batch = dict[str, Tensor]
SIZES = Sizes(heads=4, shared=2)


class Body(nn.Module):
    """Everything but the head; (batch, time) → (batch, time, width)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(2))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Language(nn.Module):
    """A body and a head, which losses may call one by one."""

    def __init__(self, sizes: Sizes = SIZES) -> None:
        super().__init__()
        self.body, self.head = Body(sizes), nn.Linear(sizes.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))


def by_parts(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The usual loss, without the root."""
    logits = model.head(model.body(batch["tokens"]))
    return F.cross_entropy(logits.view(-1, VOCABULARY), batch["targets"].reshape(-1), reduction="sum"), logits.numel()


def of_probabilities(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """Reads all of the vocabulary."""
    return model.head(model.body(batch["tokens"])).softmax(-1).square().sum(), len(batch["tokens"])


def of_features(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """Reads all features of the residual, which no shape tells, and nothing of the head."""
    return model.body(batch["tokens"]).square().cumsum(-1).sum(), len(batch["tokens"])


def of_pairs(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """Holds rows against one another."""
    features = F.normalize(model.body(batch["tokens"]).mean(1), dim=-1)
    return F.cross_entropy(features @ features.t(), torch.arange(len(features)), reduction="sum"), len(features)


def of_both(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """Calls the model, and a part of it again."""
    return model(batch["tokens"]).logsumexp(-1).sum() + of_features(model, batch)[0], len(batch["tokens"])


def work(loss: Callable[..., Any]) -> Work:
    """One step on three short rows."""
    torch.manual_seed(0)
    return Work(disturbed(Language().double()), rows=3, sequence=5, steps=1, loss=loss)


CASES = [
    (by_parts, {"algorithm": "2d", "q": 2}),
    (by_parts, {"x": 2, "y": 2}),
    (of_probabilities, {"y": 2}),
    (of_features, {"x": 2}),
    (of_pairs, {"x": 2}),
    (of_both, {"x": 2, "y": 2}),
]


@pytest.mark.parametrize(("loss", "grid"), CASES)
def test_what_modules_give_to_a_loss_is_whole_for_it(
    loss: Callable[..., Any], grid: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "MOST_RANKS", 0)  # at any size
    one = work(loss)
    for found in on_threads(one, {"placement": {"precision": "fp64", "tensor": {"algorithm": "4d", **grid}}}):
        assert_equal(found, serial(one))


class Turned(nn.Module):
    """Gives features in a dim that is not the last."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body(SIZES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens).transpose(1, 2)


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned, self.head = Turned(), nn.Linear(SIZES.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.turned(tokens).transpose(1, 2))


def refused(model: nn.Module, loss: Callable[..., Any], **grid: int) -> str:
    """What the first rank says."""

    def body(world: wire.World) -> str:
        example = {"tokens": torch.arange(10).view(2, 5)}
        with pytest.raises(PlacementError) as refusal:
            plan = {"placement": {"tensor": {"algorithm": "4d", **grid}}}
            parallelize(model, loss, OptimizerOptions(), plan, world=world, example=example)
        return str(refusal.value)

    return wire.threads.launch(2, body)[0]


def test_a_part_that_would_reach_the_loss_is_refused_by_the_name_of_its_module() -> None:
    words = refused(Holding(), lambda model, batch: (model.turned(batch["tokens"]).square().sum(), 1), x=2)
    assert words.startswith("turned: the loss calls it, and would be given [2, 7, 5] of [2, 14, 5]")


def test_features_whose_gradient_the_loss_watches_do_not_reach_the_next_module_in_parts() -> None:
    def loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
        features = model.body(batch["tokens"])
        features.register_hook(lambda gradient: 2 * gradient)
        return model.head(features).logsumexp(-1).sum(), 1

    words = refused(Language(), loss, x=2)
    assert "[2, 5, 14] was changed in place or is watched, and is then given to a module of the model" in words


@pytest.mark.parametrize("reentrant", [False, True])
def test_logits_that_backward_would_use_again_are_refused(reentrant: bool) -> None:
    def loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
        logits = model(batch["tokens"])
        return checkpoint(lambda one: one.logsumexp(-1).sum(), logits, use_reentrant=reentrant), 1

    words = refused(Language(), loss, y=2)
    assert "loss: logits of shape [2, 5, 37] are used inside torch.utils.checkpoint" in words and "over axis y" in words
