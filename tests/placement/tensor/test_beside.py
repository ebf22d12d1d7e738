"""What is no feature and joins some: slopes and scales of heads, buffers, masks by head; dealt as the features are."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.anatomy import Beside, restored, survey
from plain import VOCABULARY, Work, assert_equal, disturbed, lift_casts, on_threads, serial

from .test_refused import HIDDEN, WIDTH, Vectors, plan

GRIDS = ({"y": 2}, {"x": 2, "y": 2})


def exact(work: Work, grid: dict[str, int]) -> None:
    for found in on_threads(work, plan(**grid)):
        assert_equal(found, serial(work))


# ---- ALiBi

SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 24}
FALCON: dict[str, Any] = {
    **SHAPE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "alibi": True,
    "ffn_hidden_size": 40,
}
STOCK: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {**SHAPE, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "bloom, 3 heads": ("Bloom", {**SHAPE, "n_layer": 2, "n_head": 3}),
    "mpt": ("Mpt", {"vocab_size": VOCABULARY, "d_model": 24, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}),
    "falcon": ("Falcon", {**FALCON, "multi_query": False, "new_decoder_architecture": False}),
}


@functools.cache
def stock(name: str) -> Work:
    import transformers

    kind, settings = STOCK[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    prepare = functools.partial(lift, kind)
    return Work(disturbed(model.double()), steps=2, prepare=prepare)


def lift(kind: str, model: nn.Module) -> None:
    lift_casts(model, "Attention")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", STOCK)
def test_biases_by_distance_and_head_equal_one_process(name: str, grid: dict[str, int]) -> None:
    exact(stock(name), grid)


def test_the_anatomy_says_so() -> None:
    """A place among what the attention is given; rows × heads in one dim. It travels to other processes as JSON."""
    ours = stock("bloom")
    anatomy = survey(ours.fresh(), ours.loss, ours.batch(0))
    paths = [f"transformer.h.{layer}.self_attention" for layer in range(2)]
    assert anatomy.beside == {f"{path}:3": Beside("y", -3, 4, True, path, 3) for path in paths}
    assert restored(json.loads(json.dumps(dataclasses.asdict(anatomy)))) == anatomy


# ---- parameters and buffers with an element or a matrix a head

HEAD = 2
Way = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of an attention, its queries and its scores [rows, heads, time, …]."""


class Attention(nn.Module):
    """Attention with something of its own for each head; key-value heads may be fewer."""

    slopes: Tensor

    def __init__(self, way: Way, heads: int = 4, shared: int = 4) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, heads * HEAD), nn.Linear(WIDTH, shared * HEAD)
        self.value, self.out = nn.Linear(WIDTH, shared * HEAD), nn.Linear(heads * HEAD, WIDTH)
        self.vector, self.four = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.ones(1, heads, 1, 1))
        self.rows, self.matrix = nn.Parameter(torch.ones(heads, HEAD)), nn.Parameter(torch.ones(heads, HEAD, HEAD))
        self.columns = nn.Parameter(torch.ones(3, heads))
        self.register_buffer("slopes", torch.linspace(0, 1, heads)[:, None, None])
        self.way, self.n_rep = way, heads // shared

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (self.query, self.key, self.value))
        k, v = (one.repeat_interleave(self.n_rep, 1) for one in (k, v))
        q, _ = self.way(self, q, q)
        _, scores = self.way(self, q, q @ k.transpose(-1, -2))
        mixed = scores.softmax(-1)[..., : k.shape[2]] @ v
        return self.out(mixed.transpose(1, 2).flatten(-2))


WAYS: dict[str, Way] = {
    "vector": lambda net, q, s: (q * net.vector[:, None, None], s),
    "four dims": lambda net, q, s: (q, s * net.four.exp()),
    "turned": lambda net, q, s: (q, s * net.columns.T[:, :, None]),
    "rows": lambda net, q, s: (F.normalize(q, dim=-1) * net.rows[:, None], s),
    "matrix": lambda net, q, s: (torch.einsum("bhtd,hde->bhte", q, net.matrix), s),
    "product": lambda net, q, s: (q @ net.matrix, s),
    "sink": lambda net, q, s: (q, torch.cat([s, net.vector.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1)),
    "buffer": lambda net, q, s: (q, s + net.slopes),
    "scalar": lambda net, q, s: (q * net.four[:, :1, 0, 0].expand(1, q.shape[1])[..., None, None], s),
    "both": lambda net, q, s: (q * net.slopes.exp(), s * net.four),
}


class Heads(nn.Module):
    """One block with such an attention."""

    def __init__(self, way: Way, **sizes: int) -> None:
        super().__init__()
        self.enter, self.leave, self.attention = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5), Attention(way, **sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave((x + self.attention(x)).mean(1))


def heads(way: Way, **sizes: int) -> Work:
    torch.manual_seed(0)
    return Vectors(disturbed(Heads(way, **sizes).double()))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_what_a_head_has_of_its_own_is_dealt_with_it(name: str, grid: dict[str, int]) -> None:
    exact(heads(WAYS[name]), grid)


@pytest.mark.parametrize(("sizes", "y"), [((6, 3), 2), ((4, 2), 4), ((3, 3), 2)], ids=str)
@pytest.mark.parametrize("name", ("sink", "buffer", "matrix"))
def test_it_is_where_grouped_and_uneven_heads_are(name: str, sizes: tuple[int, int], y: int) -> None:
    """Six queries of three key-value heads lie as 4 and 2, not as 3 and 3."""
    exact(heads(WAYS[name], heads=sizes[0], shared=sizes[1]), {"y": y})


# ---- tables and buffers over features


class Placed(nn.Module):
    """Sines of positions, which a module of its own adds; a buffer on the hidden features."""

    sines: Tensor
    ramp: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sines", torch.sin(torch.arange(16 * WIDTH).view(1, 16, WIDTH) * 0.1))
        self.register_buffer("ramp", torch.linspace(0, 1, HIDDEN))
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + self.sines[:, : x.shape[1]]
        x = x + self.down(self.up(x).tanh() * self.ramp)
        return self.leave(x.mean(1))


@pytest.mark.parametrize("grid", ({"x": 2}, {"x": 3, "y": 2}), ids=str)
def test_buffers_over_features_are_dealt_with_these(grid: dict[str, int]) -> None:
    torch.manual_seed(0)
    exact(Vectors(disturbed(Placed().double())), grid)
