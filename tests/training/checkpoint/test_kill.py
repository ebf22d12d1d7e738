"""kill -9 at a random moment of saving: what is chosen afterwards is whole, and the next run goes on from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fourfold.training.checkpoint import Box, latest, load, save
from fourfold.training.checkpoint.layout import leftovers
from fourfold.training.checkpoint.verification import check_all

from .nursery import COLUMNS, ROWS


def kill_and_look(root: Path, count: int, seed: int) -> None:
    nursery = Path(__file__).with_name("nursery.py")
    subprocess.run([sys.executable, str(nursery), str(root), str(count), str(seed)], check=True, timeout=240)
    for index in range(count):
        folder = root / str(index)
        path = latest(folder)
        assert path is not None
        check_all(path)
        values = torch.zeros(ROWS, COLUMNS)
        step = load(path, [Box.whole("w", values)])["step"]
        assert path.name == f"step-{step:08d}"
        assert bool((values == step).all())
        after = save(folder, step + 1, [Box.whole("w", values + 1)], {"step": step + 1}, rank=0, writers=[0]).wait()
        assert latest(folder) == after
        assert not leftovers(folder)


def test_three_kills(tmp_path):
    kill_and_look(tmp_path, 3, seed=11)


@pytest.mark.long
def test_twenty_kills(tmp_path):
    kill_and_look(tmp_path, 20, seed=12)
