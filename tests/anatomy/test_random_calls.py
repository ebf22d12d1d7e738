"""Random numbers that are torch's own, in a forward in training: each call is named with its module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.anatomy import survey

Function = Callable[[Tensor], Tensor]


def attend(x: Tensor, dropout_p: float = 0.0) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout_p)


DRAWS: dict[str, Function] = {
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "rand": lambda x: x * (torch.rand(8, device=x.device) > 0.5),
    "randperm": lambda x: x[:, torch.randperm(8, device=x.device)],
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "multinomial": lambda x: x + torch.multinomial(x.softmax(-1), 1),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x.view(-1, 2, 4, 1).expand(-1, 2, 4, 4), 2, 2).flatten(
        1
    ),
    "native_dropout": lambda x: torch.native_dropout(x, 0.2, True)[0],
}
QUIET: dict[str, Function] = {
    "dropout": lambda x: F.dropout(x, 0.2),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x, 0.2, True),
    "attention": lambda x: attend(x.view(-1, 2, 4), dropout_p=0.1),
    "attention without dropout": lambda x: attend(x.view(-1, 2, 4)),
    "in evaluation": lambda x: F.rrelu(x, training=False),
    "a layer drop that is off": lambda x: x if torch.rand([]) < 0.0 else x + 1,
}


class Inner(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def model(function: Function) -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(8, 8), "noise": Inner(function)})


def loss(model: nn.Module, batch) -> tuple[Tensor, int]:
    return model["noise"](model["first"](batch["x"])).sum(), 1  # type: ignore[index]


@pytest.mark.parametrize("function", DRAWS)
def test_a_call_is_named_with_its_module(function: str):
    anatomy = survey(model(DRAWS[function]), loss, {"x": torch.zeros(2, 8)})
    assert anatomy.random_calls == (("noise", function),)
    (line,) = anatomy.inexact
    assert line.startswith(f"noise calls {function}, which draws from torch's own generator")


@pytest.mark.parametrize("function", QUIET)
def test_what_is_logical_or_draws_nothing_is_not_named(function: str):
    anatomy = survey(model(QUIET[function]), loss, {"x": torch.zeros(2, 8)})
    assert anatomy.random_calls == () and anatomy.inexact == ()


def test_a_layer_drop_that_is_on_is_named():
    anatomy = survey(model(lambda x: x if torch.rand([]) < 0.5 else x + 1), loss, {"x": torch.zeros(2, 8)})
    assert anatomy.random_calls == (("noise", "rand"),)


def test_each_module_and_function_is_named_once():
    twice = model(lambda x: x + torch.rand_like(x) + torch.rand_like(x))
    assert survey(twice, loss, {"x": torch.zeros(2, 8)}).random_calls == (("noise", "rand_like"),)


def test_stock_architectures_draw_nothing_of_torchs(architecture):
    """OPT draws a number for a layer drop that is off: it decides nothing."""
    anatomy = survey(architecture.build(), architecture.loss, architecture.batch(1))
    assert (anatomy.random_calls, anatomy.layouts, anatomy.inexact) == ((), {}, ())
    assert anatomy.dropouts
