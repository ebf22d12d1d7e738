"""The workload that small recipes share: a GPT on thread ranks, of sizes that 1 to 4 ranks divide."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fourfold.models import gpt

SHAPE = gpt.Config(vocabulary=192, context=48, layers=2, width=192, heads=4)
ROWS = 12
LENGTH = 16


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model, with the same weights at every call."""
    return copy.deepcopy(_TEMPLATE).to(dtype)


def batch() -> dict[str, Tensor]:
    """One global batch."""
    return {"tokens": torch.randint(SHAPE.vocabulary, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(7))}


def parameters() -> int:
    """Logical elements, a tied weight once."""
    return sum(parameter.numel() for parameter in _TEMPLATE.parameters())


def _template() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return gpt.GPT(SHAPE)


_TEMPLATE = _template()
