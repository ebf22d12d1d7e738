"""`train` on thread ranks, of which the first waits for a message that nobody sends, and the others for the first.

Run by `test_stuck.py` as a process: configuration file, file to write once it is stuck.
"""

import sys
from pathlib import Path

import torch

from fourfold.config import load
from fourfold.training.launch import train
from fourfold.training.trainer import Trainer

taken = Trainer._step


def step(self: Trainer):
    if self.run.number == 2 and self.run.world.rank == 0:
        Path(sys.argv[2]).touch()
        self.run.mesh["z"].receive(torch.empty(1), 1, "weight").wait()
    return taken(self)


if __name__ == "__main__":
    Trainer._step = step
    outcome = train(load(sys.argv[1]))
    print(outcome.text())
    sys.exit(0 if outcome.ok else 3)
