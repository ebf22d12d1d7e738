"""Values that all ranks have alike, and that every rank gives to split features of its own: gates, routers, scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.placement.tensor import trial
from plain import assert_equal, disturbed, on_threads, serial

from .test_refused import HIDDEN, WIDTH, Vectors, plan, refusals

GRIDS = ({"x": 2}, {"y": 2}, {"x": 2, "z": 2}, {"x": 2, "y": 2})

Mixture = Callable[[Tensor, Tensor], Any]
"""Of scores [rows, time, experts] and what each expert makes [rows, time, experts, width]."""


def largest(scores: Tensor) -> Tensor:
    """0 and 1: the two largest scores of a token."""
    return torch.zeros_like(scores).scatter(-1, scores.topk(2, -1).indices, 1.0)


def scattered(scores: Tensor, made: Tensor) -> Tensor:
    values, places = scores.softmax(-1).topk(2, -1)
    values = values / values.sum(-1, keepdim=True)
    return torch.einsum("bte,btew->btw", torch.zeros_like(scores).scatter_(-1, places, values), made)


def gathered(scores: Tensor, made: Tensor) -> Tensor:
    values, places = scores.topk(2, -1)
    chosen = made.gather(2, places[..., None].expand(*places.shape, made.shape[-1]))
    return torch.einsum("...k,...kw->...w", values.softmax(-1), chosen)


MIXTURES: dict[str, Mixture] = {
    "einsum": lambda scores, made: torch.einsum("bte,btew->btw", scores.softmax(-1), made),
    "masked": lambda scores, made: torch.einsum("bte,btew->btw", scores.softmax(-1) * largest(scores), made),
    "scattered": scattered,
    "gathered": gathered,
    "matmul": lambda scores, made: (scores.softmax(-1).unsqueeze(-2) @ made).squeeze(-2),
    "unbound": lambda scores, made: sum(
        s[..., None] * m for s, m in zip(scores.softmax(-1).unbind(-1), made.unbind(-2), strict=True)
    ),
    "filled": lambda scores, made: (
        scores.masked_fill(largest(scores) == 0, float("-inf")).softmax(-1)[..., None] * made
    ).sum(-2),
}


class Expert(nn.Module):
    """A small MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Mixed(nn.Module):
    """A dense mixture of experts behind a residual."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(Expert() for _ in range(3))
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        made = torch.stack([expert(x) for expert in self.experts], -2)
        return self.leave((x + self.mixture(self.router(x), made)).mean(1))


Gate = Callable[[Any, Tensor], Tensor]
"""Of a net and its residual [rows, time, width]."""


def centred(net: Any, x: Tensor) -> Tensor:
    gate = net.score(x)
    return gate / (1 + gate.square().sum(1, keepdim=True))


GATES: dict[str, Gate] = {
    "squeezed": lambda net, x: net.score(x).squeeze(-1).sigmoid().unsqueeze(-1),
    "excited": lambda net, x: net.up2(F.relu(net.up1(x.mean(1)))).sigmoid()[:, None],
    "sum": centred,
    "over time": lambda net, x: net.score(x).squeeze(-1).softmax(-1)[..., None],
    "einsum": lambda net, x: torch.einsum("bts,bus->bt", net.score(x), net.score(x).tanh())[..., None],
    "product of parameters": lambda net, x: (net.one * net.other).exp(),
    "sum of parameters": lambda net, x: torch.exp((net.first * net.second).sum()) - net.one,
    "cut parameter": lambda net, x: torch.stack([net.one, net.other]).softmax(0)[0],
}


class Gated(nn.Module):
    """A residual whose branch has a gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.branch, self.score = Expert(), nn.Linear(WIDTH, 1)
        self.up1, self.up2 = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.one, self.other = nn.Parameter(torch.tensor([0.3])), nn.Parameter(torch.tensor([0.7]))
        self.first, self.second = (nn.Parameter(torch.linspace(0, 1, 3)) for _ in range(2))
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave((x + self.gate(self, x) * self.branch(x)).mean(1))


def exact(net: nn.Module, grid: dict[str, int]) -> None:
    work = Vectors(disturbed(net.double()))
    for found in on_threads(work, plan(**grid)):
        assert_equal(found, serial(work))


def pairs(names: Iterable[str]) -> list[Any]:
    """Every name on the grid of two axes; on each of the others, every third."""
    found = [(name, GRIDS[-1]) for name in names]
    found += [(name, grid) for at, grid in enumerate(GRIDS[:-1]) for name in list(names)[at::3]]
    return [pytest.param(name, grid, id=f"{name} {grid}") for name, grid in found]


@pytest.mark.parametrize(("name", "grid"), pairs(MIXTURES))
def test_mixtures_of_dense_experts_equal_one_process(name: str, grid: dict[str, int]) -> None:
    torch.manual_seed(0)
    exact(Mixed(MIXTURES[name]), grid)


@pytest.mark.parametrize(("name", "grid"), pairs(GATES))
def test_gates_on_the_residual_equal_one_process(name: str, grid: dict[str, int]) -> None:
    torch.manual_seed(0)
    exact(Gated(GATES[name]), grid)


# ---- what no sum would make right


class Twice(nn.Module):
    """Something of its own is used on the residual, and again on hidden features."""

    def __init__(self, gate: Gate, again: Gate) -> None:
        super().__init__()
        self.enter, self.leave, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 1)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scalar, self.vector = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(WIDTH))
        self.gate, self.again = gate, again

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(x)
        gate = self.gate(self, x)
        hidden = self.up(x).tanh()
        x = x * gate + self.down(hidden * self.again(self, gate))
        return self.leave(x.mean(1)), gate


def weighed(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Cross-entropy of the first output, and a penalty on the second."""
    logits, gate = model(batch["inputs"])
    return F.cross_entropy(logits, batch["targets"], reduction="sum") + gate.square().sum(), len(logits)


SCORE = "score.weight: used with features over x by"
TWICE: dict[str, tuple[Gate, Gate, str]] = {
    "scalar": (lambda net, x: net.scalar.exp(), lambda net, gate: net.scalar, "scalar: used with features over x by"),
    "both axes": (lambda net, x: net.score(x), lambda net, gate: gate, SCORE),
    "returned": (
        lambda net, x: net.score(x),
        lambda net, gate: net.scalar,
        SCORE,
    ),
}


def first(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Cross-entropy of the first output."""
    logits, _ = model(batch["inputs"])
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits)


def test_a_vector_on_the_residual_and_on_as_many_hidden_features_is_exact() -> None:
    """With x = y every shape would fit, and features would be given the factors of others."""
    torch.manual_seed(0)
    net = Twice(lambda net, x: net.vector, lambda net, gate: net.vector)
    work = Vectors(disturbed(net.double()), loss=first)
    for found in on_threads(work, plan(x=2, y=2)):
        assert_equal(found, serial(work))


@pytest.mark.parametrize("name", TWICE)
def test_what_is_used_in_part_and_otherwise_is_named_without_a_trial(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the survey, which models of any size have."""
    gate, again, words = TWICE[name]
    monkeypatch.setattr(trial, "attempt", lambda *about: pytest.fail("there was a trial"))
    torch.manual_seed(0)
    work = Vectors(disturbed(Twice(gate, again).double()), loss=weighed)
    for said in refusals(work, monkeypatch, x=2, y=2):
        assert words in said, said
