"""What a loss may return, and the words for what it may not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.training.loss_value import LossError
from fourfold.training.run import parallelize
from plain import SGD, Work, gpt

WORK = Work(gpt())
PLANS = [{"data": 2}, {"z": 2, "shard": "parameters"}]


def total(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return WORK.loss(model, batch)[0]


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["tokens"])


CASES: dict[str, Callable[..., Any]] = {
    r"expected a pair, found a tensor of torch.float64, shape \[\]": total,
    "expected a pair, found NoneType": lambda model, batch: None,
    "expected a pair, found a tuple of 3": lambda model, batch: (total(model, batch), 1, 2),
    "a tensor for the sum, found float": lambda model, batch: (float(total(model, batch).detach()), 1),
    r"scalar for the sum, found a tensor of torch.float64, shape \[\d\]": lambda model, batch: (
        logits(model, batch).sum((1, 2)),
        1,
    ),
    r"scalar for the sum, found a tensor of torch.int64": lambda model, batch: (logits(model, batch).argmax(), 1),
    "found one without a gradient": lambda model, batch: (total(model, batch).detach(), 1),
    r"one number for the count, found a tensor of torch.float32, shape \[5\]": lambda model, batch: (
        total(model, batch),
        torch.ones(5),
    ),
    "one number for the count, found NoneType": lambda model, batch: (total(model, batch), None),
}


@pytest.mark.parametrize("placement", PLANS)
@pytest.mark.parametrize("words", CASES)
def test_what_cannot_be_trained_on_is_refused_in_words(words: str, placement: dict[str, Any]) -> None:
    def body(world: wire.World) -> None:
        plan = {"placement": {**placement, "precision": "fp64"}}
        run = parallelize(WORK.fresh(), CASES[words], SGD, plan, world=world, example=WORK.batch(0))
        with pytest.raises(LossError, match=words):
            run.step(WORK.batch(0))

    wire.threads.launch(2, body)


def test_a_model_without_a_weight_to_train_is_refused_by_step_and_evaluated() -> None:
    def body(world: wire.World) -> None:
        model = WORK.fresh().requires_grad_(False)
        run = parallelize(model, WORK.loss, SGD, {"placement": {"data": 2}}, world=world, example=WORK.batch(0))
        with pytest.raises(LossError, match="GPT: expected a weight to train, found all of them frozen"):
            run.step(WORK.batch(0))
        assert math.isfinite(run.evaluate([WORK.batch(0)]))

    wire.threads.launch(2, body)


@pytest.mark.parametrize("count", [5, 5.0, torch.tensor(5), torch.tensor([5.0])])
def test_a_sum_of_one_element_and_any_number_are_taken(count: Any) -> None:
    def body(world: wire.World) -> float:
        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
            return [total(model, batch).view(1), count]

        run = parallelize(WORK.fresh(), loss, SGD, {"placement": {"precision": "fp64"}}, world=world)
        return run.step(WORK.batch(0)).loss

    expected = float(total(WORK.fresh(), WORK.batch(0)).detach()) / 5
    assert wire.threads.launch(1, body)[0] == pytest.approx(expected, rel=1e-12)
