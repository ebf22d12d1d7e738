"""A gloo rank that all-reduces; from one step on, the last rank stays away. Run by `test_stuck.py` as a process."""

import os
import sys
import time
from pathlib import Path

import torch

from fourfold.training.folder import RunFolder
from fourfold.training.process import as_rank, leave
from fourfold.training.stop import Stop
from fourfold.wire import Mesh, join
from fourfold.wire.watch import Watch

FOLDER = RunFolder(Path(sys.argv[1]))
RANKS, RANK = FOLDER.ranks(int(os.environ["TORCHELASTIC_RESTART_COUNT"])), int(os.environ["RANK"])


def work() -> None:
    watch = Watch(RANKS, RANK)
    world = join("gloo", timeout=600)
    world.watch = watch
    axis = Mesh(world, {"data": world.size})["data"]
    for step in range(3):
        axis.ledger.begin(step)
        axis.all_reduce(torch.ones(100), "gradient").wait()
    if RANK == world.size - 1:
        (FOLDER.path / "stuck").write_text(str(RANKS))
        time.sleep(600)
    axis.all_reduce(torch.ones(100), "gradient").wait()


if __name__ == "__main__":
    with Stop():
        leave(as_rank(RANKS, RANK, work, lambda: 3))
