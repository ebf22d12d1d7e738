"""The benchmark for GPUs runs: its dry check on the CPU passes, and says that it measured nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py")]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def test_the_dry_check_passes_and_says_that_nothing_was_measured() -> None:
    done = subprocess.run(
        [*COMMAND, "--device", "cpu", "--small"], capture_output=True, text=True, timeout=300, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DRY CHECK on the CPU: nothing was measured on a GPU" in done.stdout
    for line in ("fourfold fp32 none", "fourfold bf16 full", "masks on cpu: equal", "gloo z 2 shard parameters bf16"):
        assert line in done.stdout, line


def test_without_a_gpu_it_refuses_and_names_the_dry_check() -> None:
    if torch.cuda.is_available():
        return
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 2
    assert "--device cpu --small" in done.stderr
