"""What looks at which features, heads, rows or time steps are here, or how many, is named; the rest is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold import wire
from fourfold.placement import placing
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.probe import Call, agrees
from fourfold.plan import Plan
from fourfold.training.run import parallelize
from plain import VOCABULARY, Work, assert_equal, disturbed, on_threads, serial

from .test_refused import HIDDEN, WIDTH, Vectors, plan, vectors

Way = Callable[[Any, Tensor], Tensor]


def tensor(algorithm: str, **sizes: int) -> dict[str, Any]:
    return {"placement": {"precision": "fp64", "tensor": {"algorithm": algorithm, **sizes}}}


def refused(work: Work, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Every rank refuses before an arena is made, and some rank says so in these words."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an arena was made")

    def rank(world: wire.World) -> str:
        with pytest.raises(PlacementError) as caught:
            parallelize(work.fresh(), work.loss, work.options, settings, world=world, example=work.batch(0))
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(placing, "Arena", never)
        said = wire.threads.launch(Plan.of(settings).world, rank)
    assert any(words in one for one in said), said


def exact(work: Work, settings: dict[str, Any]) -> None:
    expected = serial(work)
    for found in on_threads(work, settings):
        assert_equal(found, expected)


# ---- features and heads

HEAD = 3


def heads(way: Way) -> Way:
    """`way` of [rows, 3, heads, 3]."""
    return lambda net, y: way(net, y.unflatten(-1, (-1, HEAD))).flatten(-2)


PICKED: dict[str, tuple[Way, str]] = {
    "narrow": (heads(lambda net, y: y * net.ramp.narrow(0, 0, y.shape[2])[:, None]), "narrow"),
    "constant": (lambda net, y: y * torch.linspace(0, 1, HIDDEN).double()[: y.shape[-1]], "__getitem__"),
}


@pytest.mark.parametrize("name", PICKED)
def test_places_in_buffers_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, function = PICKED[name]
    refused(vectors(way), plan(y=2), monkeypatch, f"the model: {function} does not make of a part")


def test_places_inside_of_heads_are_exact() -> None:
    exact(vectors(heads(lambda net, y: torch.cat([y[..., 1:], y[..., :1] * y[..., -1:]], -1))), plan(y=2))


class Grouped(nn.Module):
    """Four heads of queries, and as many of keys or two, which are repeated; `joined` with the queries at the end."""

    def __init__(
        self,
        repeated: Callable[[Tensor], Tensor],
        shared: int = 2,
        joined: Callable[..., Tensor] = lambda mixed, q: mixed,
    ) -> None:
        super().__init__()
        self.enter, self.out, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(4 * HEAD, WIDTH), nn.Linear(WIDTH, 5)
        self.query, self.key = nn.Linear(WIDTH, 4 * HEAD), nn.Linear(WIDTH, shared * HEAD)
        self.repeated, self.joined = repeated, joined

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        q, k = (linear(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for linear in (self.query, self.key))
        k = self.repeated(k)
        mixed = self.joined(F.scaled_dot_product_attention(q, k, k), q)
        return self.leave((x + self.out(mixed.transpose(1, 2).flatten(-2))).mean(1))


def test_key_value_heads_in_turn_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Vectors(disturbed(Grouped(lambda k: k.repeat(1, 2, 1, 1)).double()))
    refused(work, plan(y=2), monkeypatch, "the model: repeat does not make of a part")
    exact(Vectors(disturbed(Grouped(lambda k: k.repeat_interleave(2, 1)).double())), plan(y=2))


@pytest.mark.parametrize(
    "joined",
    [lambda a, q: a + q[:, :1], lambda a, q: a * q[:, -1:]],
    ids=("first", "last"),
)
def test_places_among_heads_are_named(joined: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    work = Vectors(disturbed(Grouped(lambda k: k, shared=4, joined=joined).double()))
    refused(work, plan(y=2), monkeypatch, "the model: __getitem__ ")


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (lambda net, y: y * 2 if y.shape[-1] > 8 else y, "calls mul in the whole model"),
        (lambda net, y: y if y.shape[-1] > 8 else y.tanh(), "on a part of its heads or features it calls tanh"),
    ],
)
def test_branches_on_a_size_are_named(way: Way, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(vectors(way), plan(y=2), monkeypatch, words)


@pytest.mark.parametrize("grid", [{"x": 2}, {"y": 2}], ids=str)
def test_draws_from_torchs_generator_are_named(grid: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def skipping(net: Any, x: Tensor) -> Tensor:
        return x * torch.rand(len(x), 1, 1, dtype=x.dtype, device=x.device)

    refused(vectors(residual=skipping), plan(**grid), monkeypatch, "the model: rand draws from torch's own generator")


# ---- rows and time


class Block(nn.Module):
    """An MLP behind a norm."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.mix(self.norm(x)))))


class Mixing(nn.Module):
    """A language model whose blocks mix what they are given."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(mix) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mixing(mix: Callable[[Tensor], Tensor]) -> Work:
    return Work(disturbed(Mixing(mix).double()), rows=4, sequence=8, steps=2)


@pytest.mark.parametrize(
    ("mix", "settings", "function"),
    [
        (lambda x: x + x[:, :1], tensor("1d-sequence", y=2), "__getitem__"),
        (lambda x: x + x.select(1, 0).unsqueeze(1), tensor("1d-sequence", y=2), "select"),
        (lambda x: x + x[:1], tensor("3d", q=2), "__getitem__"),
    ],
    ids=("time", "select", "rows"),
)
def test_places_in_rows_and_time_are_named(
    mix: Callable[[Tensor], Tensor], settings: dict[str, Any], function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(mixing(mix), settings, monkeypatch, f"blocks.0: {function} does not make of a part")


def test_positions_made_on_the_default_device_are_exact() -> None:
    """In forward, a lookup takes a table on meta and places on the CPU; in the forecast's backward it would not."""
    exact(mixing(lambda x: x + x[:, :1]), tensor("4d", x=2, y=2))


# ---- what needs no refusal


def added(net: Any, x: Tensor) -> Tensor:
    x += 1
    return x


def test_what_a_linear_gives_may_be_changed_in_place() -> None:
    work = vectors(lambda net, y: F.relu(y, inplace=True), residual=lambda net, x: added(net, net.enter(x)))
    for settings in (plan(x=2, y=2), plan(y=2) | {"placement": plan(y=2)["placement"] | {"chunks": 2}}):
        exact(work, settings)


def test_a_norm_without_a_weight_is_exact() -> None:
    work = vectors(residual=lambda net, x: net.norm(x))
    work.model.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
    exact(work, plan(x=2, y=2))


def test_numbers_that_choose_from_one_entry_are_tried() -> None:
    """Integers are drawn from 0 and 1; here only 0 fits."""
    places, here = torch.zeros(4, dtype=torch.int64), {(6, 3): [[3, 4, 5]]}
    whole, local = (Call.of(F.embedding, (places, torch.zeros(1, width)), {}) for width in (6, 3))
    assert agrees(whole, local, here)


def test_a_part_of_fewer_dims_is_none() -> None:
    whole, local = (Call.of(torch.flip, (torch.zeros(shape), [0]), {}) for shape in ((4, 2), (4,)))
    assert not agrees(whole, local, {})
