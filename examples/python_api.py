"""Fourfold from Python, in ten lines: any model, a loss that returns (sum, count), an optimizer, a plan.

One process:   python examples/python_api.py
Two workers:   torchrun --nproc-per-node 2 examples/python_api.py
"""

import os
from pathlib import Path

import torch

import fourfold
from fourfold.models.gpt import GPT, Config
from fourfold.training.losses import cross_entropy

text = torch.tensor(list(Path(os.__file__).read_bytes()))
rows = text[: len(text) // 65 * 65].reshape(-1, 65)
torch.manual_seed(1)
model = GPT(Config(vocabulary=256, context=64, layers=2, width=64, heads=4))
world = fourfold.join()
plan = {"placement": {"z": world.size, "shard": "parameters"}}
run = fourfold.parallelize(model, cross_entropy, fourfold.OptimizerOptions(lr=3e-3), plan, world=world)
for step in range(20):
    result = run.step({"tokens": rows[8 * step : 8 * step + 8]})
    print(f"rank {world.rank} of {world.size}: step {result.step}, loss {result.loss:.3f}")
