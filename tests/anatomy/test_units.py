"""What stays together in the features of a linear, and what is packed side by side: small attentions of every style."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.anatomy import Anatomy, Linear, Norm, Raw, Whole, survey

WIDTH, HEADS, HEAD = 12, 3, 4
Split = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Attention(nn.Module):
    """Words, one packed projection to queries, keys and values, attention, a projection back."""

    def __init__(self, features: int, split: Split) -> None:
        super().__init__()
        self.table, self.back = nn.Embedding(5, WIDTH), nn.Linear(HEADS * HEAD, WIDTH)
        self.qkv, self.split = nn.Linear(WIDTH, features), split

    def forward(self, words: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(self.table(words)))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return self.back(mixed.transpose(1, 2).flatten(2))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def one_after_the_other(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.chunk(3, dim=-1)
    return heads(q), heads(k), heads(v)


def a_dim_of_three_outside(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.reshape(*x.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def a_dim_of_three_inside(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    packed = x.view(*x.shape[:2], HEADS, 3, HEAD)
    q, k, v = (packed[..., part, :].transpose(1, 2) for part in range(3))
    return q, k, v


def chunks_of_a_head(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.view(*x.shape[:2], HEADS, 3 * HEAD).transpose(1, 2).chunk(3, dim=-1)
    return q, k, v


def slices_with_one_key(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x[..., : HEADS * HEAD], x[..., HEADS * HEAD : -HEAD], x[..., -HEAD:]
    key, value = (part.view(*part.shape[:2], 1, HEAD).transpose(1, 2) for part in (k, v))
    return heads(q), key, value


def heads_of_queries_and_one_key(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    packed = x.view(*x.shape[:2], HEADS + 2, HEAD).transpose(1, 2)
    return packed[:, :-2], packed[:, -2:-1], packed[:, -1:]


def found(model: nn.Module) -> Anatomy:
    return survey(model, lambda m, batch: (m(batch["x"]).sum(), 1), {"x": torch.zeros(2, 6, dtype=torch.long)})


@pytest.mark.parametrize(
    ("split", "features", "unit", "parts"),
    [
        (one_after_the_other, 36, 4, (12, 12, 12)),
        (a_dim_of_three_outside, 36, 4, (12, 12, 12)),
        (a_dim_of_three_inside, 36, 12, ()),
        (chunks_of_a_head, 36, 12, ()),
        (slices_with_one_key, 20, 4, (12, 4, 4)),
        (heads_of_queries_and_one_key, 20, 4, (12, 4, 4)),
    ],
)
def test_packed_projections(split, features, unit, parts):
    anatomy = found(Attention(features, split))
    assert anatomy.linears["qkv.weight"] == Linear("normal", "x", "y", "out,in", "qkv", 1, unit, parts)
    assert anatomy.linears["back.weight"] == Linear("transposed", "y", "x", "out,in", "back", HEAD, 1)
    assert (anatomy.problems, anatomy.whole, anatomy.outputs) == ((), {}, ("x",))


class Gated(nn.Module):
    """An MLP of two halves, times a gate of a single feature; a temperature, and a scale for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 1)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)
        self.temperature, self.scale = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(8))

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        inner = F.glu(self.up(x)) * self.scale
        return x + self.gate(x).sigmoid() * self.down(inner) * self.temperature


def test_a_single_feature_and_raw_parameters():
    anatomy = found(Gated())
    assert anatomy.linears["gate.weight"] == Linear("reducing", "x", None, "out,in", "gate")
    assert anatomy.linears["up.weight"].parts == (8, 8)
    assert anatomy.raw == {"scale": Raw("y", True), "temperature": Raw("x", False)}
    assert anatomy.siblings == (("up.weight", "gate.weight"),) and anatomy.problems == ()


class Experts(nn.Module):
    """All experts' weights in one; every row goes through all of them."""

    def __init__(self, *, bmm: bool) -> None:
        super().__init__()
        self.table, self.bmm = nn.Embedding(5, WIDTH), bmm
        self.up = nn.Parameter(torch.ones(3, WIDTH, 16) if bmm else torch.ones(3, 16, WIDTH))
        self.down = nn.Parameter(torch.ones(3, 8, WIDTH) if bmm else torch.ones(3, WIDTH, 8))

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words).flatten(0, 1)
        if self.bmm:
            gate, up = torch.bmm(x.repeat(3, 1).view(3, -1, WIDTH), self.up).chunk(2, dim=-1)
            return x + torch.bmm(gate.sigmoid() * up, self.down).sum(0)
        out = torch.zeros_like(x)
        for expert in range(3):
            gate, up = F.linear(x, self.up[expert]).chunk(2, dim=-1)
            out = out + F.linear(gate.sigmoid() * up, self.down[expert])
        return x + out


@pytest.mark.parametrize(("bmm", "layout"), [(True, "expert,in,out"), (False, "expert,out,in")])
def test_experts_in_one_weight(bmm, layout):
    anatomy = found(Experts(bmm=bmm))
    assert anatomy.linears["up"] == Linear("normal", "x", "y", layout, "", 1, 1, (8, 8))
    assert anatomy.linears["down"] == Linear("transposed", "y", "x", layout, "")
    assert anatomy.problems == ()


class Depthwise(nn.Module):
    """A convolution of every feature by itself, along time."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.full = nn.Conv1d(WIDTH, 8, 3, padding=1)

    def forward(self, words: Tensor) -> Tensor:
        return self.full(self.mix(self.norm(self.table(words)).transpose(1, 2)))


def test_convolutions():
    anatomy = found(Depthwise())
    assert anatomy.linears == {"full.weight": Linear("normal", "x", "y", "out,in", "full")}
    assert anatomy.norms == {"norm": Norm("x", True)}
    # What runs whole is gathered along the last dim, and that is time here.
    assert anatomy.whole == {} and len(anatomy.problems) == 1
    assert "conv1d in 12 groups of features that are split over x" in anatomy.problems[0]


def test_a_table_of_positions_by_heads_is_cut_over_the_heads():
    class Biased(Attention):
        def __init__(self) -> None:
            super().__init__(36, one_after_the_other)
            self.distances = nn.Embedding(6, HEADS)

        def forward(self, words: Tensor) -> Tensor:
            q, k, v = self.split(self.qkv(self.table(words)))
            places = torch.arange(words.shape[1], device=words.device)
            bias = self.distances((places[:, None] - places).abs()).permute(2, 0, 1)
            mixed = ((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)
            return self.back(mixed)

    anatomy = found(Biased())
    assert anatomy.whole == {"distances": Whole(None, "y")}
    assert anatomy.linears["back.weight"].unit_in == HEAD and anatomy.problems == ()
