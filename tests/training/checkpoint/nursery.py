"""Savers that are killed. `nursery.py FOLDER COUNT SEED`: child i saves into FOLDER/i, step after step, until SIGKILL.

One interpreter imports torch once and forks each child, so that a kill costs milliseconds. Every child has two writers
(threads); tensors of step s are filled with s, so that a mixture of two steps would show.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from fourfold.training.checkpoint import Box, latest, save

ROWS, COLUMNS = 400, 1000


def save_forever(folder: Path) -> None:
    """Two writers save steps 1, 2, 3, … of a tensor cut by rows, each as soon as the last is on the disk."""
    step = 0
    while True:
        step += 1
        values = torch.full((ROWS, COLUMNS), float(step))
        savings = [
            save(
                folder,
                step,
                [Box("w", (ROWS, COLUMNS), (rank * 250, 0), values[:250] if rank == 0 else values[250:])],
                {"step": step},
                rank=rank,
                writers=(0, 1),
                keep=2,
            )
            for rank in (0, 1)
        ]
        for saving in savings:
            saving.wait()


def main() -> None:
    root, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    for index in range(count):
        folder = root / str(index)
        child = os.fork()
        if child == 0:
            save_forever(folder)
        while latest(folder) is None:
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
