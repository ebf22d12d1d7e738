"""A GPT: pre-norm decoder with learned positions (Radford et al., 2019), in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The shape of a GPT.

    Attributes:
        vocabulary: number of tokens.
        context: longest sequence, in tokens.
        layers: number of blocks.
        width: features of the residual stream.
        heads: attention heads; they divide `width`.
        hidden: features inside the MLP; 0 means 4 × width.
        dropout: probability at the embedding, the attention weights and both residual branches.
        bias: whether linears and norms have biases.
        tied: whether the head shares the weight of the token embedding.
    """

    vocabulary: int
    context: int = 256
    layers: int = 6
    width: int = 384
    heads: int = 6
    hidden: int = 0
    dropout: float = 0.0
    bias: bool = True
    tied: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"GPT: width {self.width} is not divisible by heads {self.heads}; choose heads that divide it"
            )


class Attention(nn.Module):
    """Causal self-attention, (batch, time, width) → same; q, k and v come from one linear, packed in this order."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.width, self.dropout = config.width // config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.project = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix over time: (batch, time, width) → same."""
        q, k, v = (part.view(*part.shape[:2], -1, self.width).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Linear, GELU (tanh form, as GPT-2), linear; (batch, time, width) → same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.expand = nn.Linear(config.width, hidden, bias=config.bias)
        self.contract = nn.Linear(hidden, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Each position by itself: (batch, time, width) → same."""
        return self.contract(F.gelu(self.expand(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) → same."""
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Tokens (batch, time) → logits (batch, time, vocabulary)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """GPT-2's: N(0, 0.02), biases zero, and the two residual projections of a block scaled by 1/√(2 · layers)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif name.endswith(("project.weight", "contract.weight")):
                parameter.normal_(0.0, 0.02 / (2 * self.config.layers) ** 0.5)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, time), int64, to logits; ValueError for a sequence longer than the context."""
        time = tokens.shape[1]
        if time > self.config.context:
            raise ValueError(f"GPT: a sequence of {time} tokens is longer than the context of {self.config.context}")
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(time, device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
