"""Weights that are read outside of what splits them, and what is joined with heads though it lies over another axis."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.training.losses.classification import classification
from plain import assert_equal, disturbed, on_threads, serial

from .test_refused import HIDDEN, WIDTH, Vectors, plan, refusals


class Reader(nn.Module):
    """A residual branch whose weights somebody else reads, too: in its forward, or in the loss."""

    def __init__(self, read: Callable[[Any], Tensor] | None = None) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, WIDTH))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = (x + self.down(self.up(x).tanh())) * self.scale
        return self.leave((x if self.read is None else x * self.read(self)).mean(1))


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda net: net.up.weight.norm(), r"^up\.weight: the model calls norm on it"),
        (lambda net: net.up.bias.sum(), r"^up\.bias: the model calls sum on it"),
        (lambda net: net.scale.softmax(0), r"^scale: the model calls softmax on it"),
        (lambda net: net.up.weight.T.detach().double().mean(), r"^up\.weight: the model calls mean on it"),
    ],
)
def test_a_weight_that_a_forward_reads_elsewhere_is_named(
    read: Callable[[Any], Tensor], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    for said in refusals(Vectors(disturbed(Reader(read).double())), monkeypatch, x=2):
        assert re.search(words, said), said


@pytest.mark.parametrize(
    ("penalty", "words"),
    [
        (lambda net: net.up.weight.square().sum(), r"^up\.weight: the loss calls square on it"),
        (lambda net: net.leave.weight.norm(), r"^leave\.weight: the loss calls norm on it"),
        (lambda net: (0.1 * net.down.bias).sum(), r"^down\.bias: the loss calls \w*mul\w* on it"),
        (lambda net: sum(one.pow(2).sum() for one in net.parameters()), r"^\w+(\.\w+)?: the loss calls pow on it"),
    ],
)
def test_a_penalty_on_a_weight_that_is_cut_is_named(
    penalty: Callable[[Any], Tensor], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        total, count = classification(model, batch)
        return total + penalty(model) * count, count

    torch.manual_seed(0)
    for said in refusals(Vectors(disturbed(Reader().double()), loss=loss), monkeypatch, x=2, y=2):
        assert re.search(words, said), said


def test_a_penalty_on_a_weight_that_is_whole_is_exact() -> None:
    def loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        total, count = classification(model, batch)
        return total + model.up.bias.square().sum() * count, count

    torch.manual_seed(0)
    work = Vectors(disturbed(Reader().double()), loss=loss)  # up's outputs lie over y, which has one rank
    for outcome in on_threads(work, plan(x=2)):
        assert_equal(outcome, serial(work))


class Biased(nn.Module):
    """Attention whose scores are biased by a table with a column a head."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.enter, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(9, heads)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.leave, self.heads = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5), heads

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        q, k, v = (one(x).unflatten(-1, (-1, 2)).transpose(1, 2) for one in (self.query, self.key, self.value))
        place = torch.arange(x.shape[1], device=x.device)
        bias = self.table(place[:, None] - place + 4).permute(2, 0, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, bias)
        return self.leave((x + self.out(mixed.transpose(1, 2).flatten(-2))).mean(1))


def test_a_mask_of_columns_of_a_table_is_exact() -> None:
    """With x = y every shape would fit, and heads would be given the biases of others."""
    torch.manual_seed(0)
    work = Vectors(disturbed(Biased().double()))
    expected = serial(work)
    for grid in ({"x": 2}, {"y": 2}, {"x": 2, "y": 2}):
        for outcome in on_threads(work, plan(**grid)):
            assert_equal(outcome, expected)


class Spanning(nn.Module):
    """Two key-value heads of four queries, and a norm across all heads of the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(4)
        self.query, self.key, self.value = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.out, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        parts = self.query(x), self.norm(self.key(x)), self.value(x)
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.leave((x + self.out(mixed.transpose(1, 2).flatten(-2))).mean(1))


def test_a_norm_across_heads_of_which_there_are_copies_is_exact() -> None:
    torch.manual_seed(0)
    work = Vectors(disturbed(Spanning().double()))
    for outcome in on_threads(work, plan(y=4)):
        assert_equal(outcome, serial(work))
