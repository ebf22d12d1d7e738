"""Which of a module's arguments have rows or features is told by their places, where sizes coincide; norms of authors'
own in a model, without a trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.placement.tensor import trial
from plain import VOCABULARY, Work, assert_equal, disturbed, on_threads, serial

from .test_places import refused

WIDTH, HEADS = 12, 4
Norm = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the model were too large to be tried on numbers."""
    monkeypatch.setattr(trial, "MOST_RANKS", 0)


def plan(algorithm: str, **sizes: int) -> dict[str, Any]:
    return {"placement": {"precision": "fp64", "tensor": {"algorithm": algorithm, **sizes}}}


def exact(work: Work, settings: dict[str, Any]) -> None:
    expected = serial(work)
    for found in on_threads(work, settings):
        assert_equal(found, expected)


class Attention(nn.Module):
    """Queries have a scale for each token; scores have a bias for each pair of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        cut = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k, v = cut
        y = F.scaled_dot_product_attention(q * scale, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).flatten(-2))


class Mixed(nn.Module):
    """It mixes features and heads, and so runs whole; its bias has as many entries as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Parameter(torch.eye(HEADS) + 0.1)

    def forward(self, x: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        rows, steps, _ = x.shape
        keys = self.keys(x).view(rows, steps, HEADS, -1).transpose(1, 2) * scale
        scores = torch.einsum("bhij,hg->bgij", keys @ keys.transpose(-1, -2) + bias, self.mix)
        return self.out((scores.softmax(-1) @ keys).transpose(1, 2).reshape(x.shape).roll(1, -1))


class Block(nn.Module):
    def __init__(self, attention: Norm, norm: Norm, masks_first: bool) -> None:
        super().__init__()
        self.n1, self.n2, self.attention = norm(), norm(), attention()
        self.up, self.down, self.masks_first = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH), masks_first

    def forward(self, *given: Tensor) -> Tensor:
        x, bias, scale = (given[-1], *given[:-1]) if self.masks_first else given
        x = x + self.attention(self.n1(x), bias, scale)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    def __init__(self, attention: Norm = Attention, norm: Norm = lambda: nn.LayerNorm(WIDTH), masks: str = "") -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block(attention, norm, bool(masks)) for _ in range(2)), norm()
        self.masks = masks

    def forward(self, tokens: Tensor) -> Tensor:
        x, steps = self.table(tokens), torch.arange(tokens.shape[1])
        bias = -(steps[:, None] - steps).abs().double()
        beside = bias, torch.linspace(0.5, 1.5, len(steps)).double()[:, None]
        if self.masks:
            beside = bias[None, None], beside[1]
        for block in self.blocks:
            x = block(*beside, x) if self.masks else block(x, *beside)
        return self.head(self.norm(x))


def model(**about: Any) -> nn.Module:
    torch.manual_seed(3)
    return disturbed(Model(**about).double())


# ---- rows


@pytest.mark.parametrize(("rows", "sequence"), [(8, 4), (4, 2), (8, 5)])
def test_a_bias_of_as_many_tokens_as_there_are_rows_has_none(rows: int, sequence: int) -> None:
    """Rows of a micro-batch on a rank of z: 4 or 2; tokens: as many."""
    exact(Work(model(), rows=rows, sequence=sequence, steps=2), plan("3d", q=2))


# ---- features


@dataclass(frozen=True)
class Lengths(Work):
    """A batch of another length in every step."""

    lengths: tuple[int, ...] = ()

    def batch(self, step: int) -> dict[str, Tensor]:
        return Work(self.model, rows=self.rows, sequence=self.lengths[step % len(self.lengths)]).batch(step)


@pytest.mark.parametrize("lengths", [(6, 5), (5, 6), (12, 6), (5, 12)])
def test_a_bias_of_as_many_tokens_as_there_are_features_has_none(lengths: tuple[int, ...]) -> None:
    """12 features, 6 on a rank."""
    exact(Lengths(model(attention=Mixed), rows=2, sequence=lengths[0], steps=2, lengths=lengths), plan("4d", x=2))


# ---- the order of arguments


def test_masks_before_activations_are_named_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "The first floating tensor among the arguments of a block"
    refused(Work(model(masks="first"), rows=2, sequence=5), plan("1d-sequence", y=2), monkeypatch, words)


# ---- norms of authors' own


class Normalized(nn.Module):
    """RMS norm by a unit vector, with a weight, and a number that is used or not."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.one, self.way = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(1)), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x) * self.weight * self.one


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": lambda x: F.normalize(x, dim=-1) * WIDTH**0.5,
    "size": lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-5) * x.size(-1) ** 0.5,
    "max": lambda x: x / (x.abs().max(-1, keepdim=True)[0] + 1),
    "var_mean": lambda x: (x - torch.var_mean(x, -1, keepdim=True)[1]) / torch.var_mean(x, -1, keepdim=True)[0],
}


@pytest.mark.parametrize("name", WAYS)
def test_norms_without_a_trial_are_exact(name: str) -> None:
    """And so are their bytes, of which every rank forecasts what it sends."""
    work = Work(model(norm=lambda: Normalized(WAYS[name])), rows=2, sequence=5, steps=2)
    expected = serial(work)
    for found in on_threads(work, plan("4d", x=2)):
        assert_equal(found, expected)
        assert found.measured == found.predicted


def test_norms_without_a_trial_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(model(norm=lambda: Normalized(lambda x: (x - x.mean(-1, keepdim=True)).flip(-1))), rows=2, sequence=5)
    refused(work, plan("4d", x=2), monkeypatch, "n1: calls flip across features that are cut over x")
