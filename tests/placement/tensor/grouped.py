"""A tiny decoder with grouped queries, whose sizes a test chooses: what it is trained with and on."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plain import VOCABULARY, Work, disturbed


@dataclass(frozen=True)
class Sizes:
    """Of the decoder.

    Attributes:
        heads, shared: of queries; of keys and values.
        width, hidden: features of the residual; inside the MLP.
        bias: linears have one.
        tied: the head is the table of tokens.
        dropout: of the attention weights and behind both branches.
    """

    heads: int = 6
    shared: int = 2
    width: int = 14
    hidden: int = 17
    bias: bool = True
    tied: bool = False
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal, (batch, time, width) → same."""

    def __init__(self, sizes: Sizes, each: int = 4) -> None:
        super().__init__()
        self.each, self.dropout = each, sizes.dropout
        self.query = nn.Linear(sizes.width, sizes.heads * each, bias=sizes.bias)
        self.key = nn.Linear(sizes.width, sizes.shared * each, bias=sizes.bias)
        self.value = nn.Linear(sizes.width, sizes.shared * each, bias=sizes.bias)
        self.project = nn.Linear(sizes.heads * each, sizes.width, bias=sizes.bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = (linear(x).unflatten(-1, (-1, self.each)) for linear in (self.query, self.key, self.value))
        q, k, v = (part.transpose(1, 2) for part in parts)
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=True)
        return self.project(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.RMSNorm(sizes.width, eps=1e-6)
        self.attention = Attention(sizes)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=sizes.bias)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=sizes.bias)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=sizes.bias)
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        y = self.norm2(x)
        return x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y)))


class Decoder(nn.Module):
    """Tokens (batch, time) → logits (batch, time, vocabulary)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(2))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, VOCABULARY, bias=False)
        if sizes.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@functools.cache
def decoder(sizes: Sizes = Sizes()) -> Decoder:
    """With values, in float64; every copy of it starts alike."""
    torch.manual_seed(0)
    return disturbed(Decoder(sizes).double())


def decoding(sizes: Sizes = Sizes(), **settings: object) -> Work:
    """Two steps on five short rows."""
    about: dict = {"rows": 5, "sequence": 5, "steps": 2, **settings}
    return Work(decoder(sizes), **about)
