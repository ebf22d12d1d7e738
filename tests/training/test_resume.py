"""kill -9 to a training command at a random step: `--resume` ends bit for bit where an unkilled run does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fourfold.config import Config, load, resolved
from fourfold.training import checkpoint
from fourfold.training.checkpoint.verification import check_all
from fourfold.training.data import synthetic
from fourfold.training.journal import read
from fourfold.training.launch import train

KILLING = Path(__file__).with_name("killing.py")
STEPS = 40
PLANS = [{"data": 2}, {"z": 2, "shard": "optimizer"}, {"z": 2, "shard": "parameters"}]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, synthetic(3000, 40))
    return path


def configuration(root: Path, tokens: Path, plan: dict, every: int, name: str, backend: str) -> Path:
    """A tiny run of two ranks, dropout on, with a checkpoint every so many steps."""
    settings = {
        "model": {"layers": 2, "width": 16, "heads": 2, "context": 8, "dropout": 0.1},
        "data": {"name": "tokens", "files": [str(tokens)], "sequence": 8, "vocabulary": 40, "held_out": 0.1},
        "optimizer": {"lr": 0.01, "warmup": 5},
        "train": {"steps": STEPS, "batch": 6, "evaluate_every": 10},
        "plan": {"placement": plan},
        "run": {"folder": str(root), "name": name, "tensorboard": False, "checkpoint_every": every, "keep": 2},
        "launch": {"backend": backend},
    }
    path = root / f"{name}.yaml"
    path.write_text(resolved(Config.model_validate(settings)))
    return path


def numbers(folder: Path) -> list[tuple]:
    """Every number that a run journalled and that does not tell the time."""
    kept = [record for record in read(folder / "journal.jsonl") if record["kind"] in ("step", "evaluation")]
    return [(one["kind"], one["step"], one["loss"], one["count"], one.get("gradient_norm")) for one in kept]


def weights(folder: Path) -> dict[str, bytes]:
    """Every byte of the last checkpoint's tensors: weights and optimizer state."""
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    check_all(newest)
    assert newest.name == f"step-{STEPS:08d}"
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def kill_and_compare(root: Path, tokens: Path, *, kills: int, seed: int, plan: dict, every: int) -> None:
    """A run on two gloo workers, killed so many times; beside it the same on threads, left in peace."""
    whole = train(load(str(configuration(root, tokens, plan, every, "whole", "threads"))))
    config = configuration(root, tokens, plan, every, "killed", "gloo")
    command = [sys.executable, str(KILLING), str(config), str(seed), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * (kills + 1))
    assert done.returncode == 0, done.stderr
    *told, end = map(json.loads, done.stdout.splitlines())
    print(*told, sep="\n")
    assert [one["killed"] for one in told] == [2] * kills
    assert end["exit"] == 0, done.stderr
    for before, after in zip(told, [*told[1:], end], strict=True):
        assert after["resumed"] == before["newest"]
    assert numbers(root / "killed") == numbers(whole.folder)
    assert weights(root / "killed") == weights(whole.folder)


def test_three_kills(tmp_path: Path, tokens: Path) -> None:
    kill_and_compare(tmp_path, tokens, kills=3, seed=5, plan={"z": 2, "shard": "parameters"}, every=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_twenty_kills(seed: int, tmp_path: Path, tokens: Path) -> None:
    kill_and_compare(tmp_path, tokens, kills=4, seed=100 + seed, plan=PLANS[seed % 3], every=1 + seed % 2)
