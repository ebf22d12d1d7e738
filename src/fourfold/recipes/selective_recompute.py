"""Selective recomputation: the attention core alone is computed again in backward, and its activations are not kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.planner import Subject, Traces
from fourfold.planner.formulas import layer
from fourfold.planner.recorder import FORWARD
from fourfold.planner.trace import Settings
from fourfold.recipes._claim import Claim

SIZES = {"22B": (2048, 4, 6144, 64), "175B": (2048, 1, 12288, 96)}
"""Sequence, rows, hidden, heads of two models of the paper (table 3), on one rank."""


def claim() -> Claim:
    """Korthikanti et al. 2022, equation 6 with t = 1: 34sbh instead of sbh(34 + 5as/h), in 16 bits."""
    return Claim(
        system="selective activation recomputation (Megatron-LM)",
        paper="Korthikanti et al. 2022, arXiv 2205.05198",
        statement="a layer keeps 34sbh bytes instead of sbh(34 + 5as/h), at the paper's sizes (traced, not allocated)",
        predicted={name: layer(*size, recompute="selective") for name, size in SIZES.items()},
        measure=lambda: {name: _kept(*size, recompute="selective") for name, size in SIZES.items()},
        control=lambda: {name: _kept(*size, recompute="none") for name, size in SIZES.items()},
        off="recompute: none",
    )


class Block(nn.Module):
    """The composition that the formula counts: dropout after the softmax and after both branches."""

    def __init__(self, hidden: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.project = (nn.Linear(hidden, hidden) for _ in range(4))
        self.expand, self.contract = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, sequence, hidden] to the same."""
        y = self.norm1(x)
        q, k, v = (self._split(part(y)) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        x = x + F.dropout(self.project(mixed.transpose(1, 2).reshape(x.shape)), self.dropout)
        return x + F.dropout(self.contract(F.gelu(self.expand(self.norm2(x)))), self.dropout)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Stack(nn.Module):
    """Four equal blocks."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden))
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, sequence, hidden] to the same."""
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def _kept(s: int, b: int, h: int, a: int, *, recompute: str) -> float:
    """Bytes that a middle block has added to memory when forward has gone through it, but for its norms' statistics."""
    example = {"x": torch.zeros(2, s, h, device="meta")}
    subject = Subject(lambda: Stack(h, a), lambda model, batch: (model(batch["x"]).float().sum(), 1), example, 2)
    tape = Traces(subject).tape(Settings(b, "bfloat16", recompute))
    [segment] = [one for one in tape.segments if one.phase == FORWARD and one.place == 1]
    signs = {"+": 1, "-": -1}
    changes = [
        signs[event.kind] * tape.storages[event.key].nbytes
        for event in segment.events
        if event.kind in signs and event.key is not None
    ]
    statistics = 2 * 2 * s * b * 2  # mean and reciprocal deviation of two norms: the formula leaves them out
    return sum(changes) - statistics
