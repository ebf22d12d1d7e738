"""The trace against the published activation formula, exactly (Korthikanti et al. 2022, arXiv 2205.05198; section 4).

A GPT block with dropout and without flash attention keeps sbh(34 + 5as/h) bytes for backward, in 16 bits. The formula
leaves out the statistics of the two layer norms, which are counted here by their own term.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.planner import Subject, Traces
from fourfold.planner.recorder import FORWARD
from fourfold.planner.trace import Settings


class Block(nn.Module):
    """The composition that the formula counts: every term of it is one tensor here."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.project = (nn.Linear(hidden, hidden) for _ in range(4))
        self.expand, self.contract = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def split(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        return x.view(batch, sequence, self.heads, hidden // self.heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        y = self.norm1(x)
        q, k, v = (self.split(layer(y)) for layer in (self.query, self.key, self.value))
        # as one batched product over (batch x heads), which keeps q, k, v in that layout
        q, k, v = (part.reshape(batch * self.heads, sequence, -1) for part in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) * (hidden // self.heads) ** -0.5
        weights = F.dropout(F.softmax(scores, dim=-1), self.dropout)
        mixed = torch.bmm(weights, v).view(batch, self.heads, sequence, -1).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.project(mixed), self.dropout)
        return x + F.dropout(self.contract(F.gelu(self.expand(self.norm2(x)))), self.dropout)


class Stack(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


LAYERS = 4


def kept(traces: Traces, rows: int, recompute: str = "none", streams: bool = True) -> int:
    """Bytes that a middle block has added to memory when forward has gone through it, in 16 bits."""
    tape = traces.tape(Settings(rows, "bfloat16", recompute, streams=streams))
    [segment] = [one for one in tape.segments if one.phase == FORWARD and one.place == 1]
    signs = {"+": 1, "-": -1}
    changes = [signs[event.kind] * tape.storages[event.key].nbytes for event in segment.events if event.key]
    return sum(changes)


def subject(s: int, h: int, a: int, p: float = 0.1) -> Traces:
    example = {"x": torch.zeros(2, s, h, dtype=torch.float32, device="meta")}
    return Traces(
        Subject(lambda: Stack(LAYERS, h, a, p), lambda model, batch: (model(batch["x"]).float().sum(), 1), example, 2)
    )


@pytest.mark.parametrize(
    ("s", "b", "h", "a"), [(64, 2, 32, 4), (128, 3, 48, 2), (2048, 2, 2048, 16), (32, 5, 1536, 12)]
)
def test_block_keeps_what_the_formula_says(s, b, h, a):
    statistics = 2 * 2 * s * b * 2  # mean and reciprocal deviation of two norms, in the type of the input
    traces = subject(s, h, a)
    assert kept(traces, b) - statistics == s * b * h * 34 + 5 * a * s * s * b
    assert kept(traces, b, "full") == 2 * s * b * h


def test_torchs_own_dropout_on_cpu_keeps_masks_as_wide_as_activations():
    s, b, h, a = 64, 2, 32, 4
    wider = 2 * s * b * h + a * s * s * b
    traces = subject(s, h, a)
    assert kept(traces, b, streams=False) == kept(traces, b, streams=True) + wider


def test_a_model_larger_than_this_machine_is_traced():
    s, b, h, a = 2048, 1, 12288, 96
    traces = subject(s, h, a)
    assert kept(traces, 4) == 4 * (s * b * h * 34 + 5 * a * s * s * b + 2 * 2 * s * b * 2)
