"""Small checkpoints for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fourfold.training.checkpoint import Box, save


def boxes(rank: int, value: float = 0.0) -> list[Box]:
    """What rank 0 or 1 of two holds of the tensors `w` (5 × 3, cut 3 : 2 by rows) and `s` (a scalar, on rank 1)."""
    full = torch.arange(15, dtype=torch.float32).view(5, 3) + value
    if rank == 0:
        return [Box("w", (5, 3), (0, 0), full[:3])]
    return [Box("w", (5, 3), (3, 0), full[3:]), Box.whole("s", torch.tensor(value, dtype=torch.float64))]


def save_pair(folder: Path, step: int, *, keep: int = 3) -> Path:
    """A checkpoint of two writers whose values depend on the step."""
    savings = [
        save(folder, step, boxes(rank, float(step)), {"step": step}, rank=rank, writers=(0, 1), keep=keep)
        for rank in (0, 1)
    ]
    return [saving.wait() for saving in savings][0]


def empty_pair() -> list[Box]:
    """Both tensors, to be filled."""
    return [Box.whole("w", torch.full((5, 3), -1.0)), Box.whole("s", torch.tensor(-1.0, dtype=torch.float64))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of checkpoints that does not exist yet."""
    return tmp_path / "checkpoints"
