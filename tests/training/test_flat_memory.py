"""Training holds no more after many steps than after a few: nothing of a step outlives it."""

from __future__ import annotations

import gc
from collections import Counter

import psutil
import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.models.gpt import GPT, Config
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from ranks import Processes

WARM, STEPS, WINDOWS = 60, 200, 3
GROWTH = 2 * 2**20
"""Bytes that a rank may grow by in `STEPS` steps: the ledger's 200 entries (0.4 MB), and pages that the allocator may
touch late. Measured: 0.2 to 0.5 MB; with torch's flight recorder on, 3.8 MB until that is full. Of a few windows the
one that grew least counts: threads on a busy machine get heaps of their own late, and what leaks grows in all."""


def tensors() -> Counter[str]:
    """The tensors that Python knows, by type and shape."""
    gc.collect()
    found = (one for one in gc.get_objects() if issubclass(type(one), Tensor))
    return Counter(f"{type(one).__name__} {list(one.shape)} {one.dtype}" for one in found)


def train(world: wire.World, placement: dict) -> tuple[dict[str, int], int, int]:
    """The tensors that came to stay, the bytes in `STEPS` steps, and how many collectives are under way after each."""
    torch.manual_seed(0)
    model = GPT(Config(64, 8, 3, 32, 2, tied=False))
    options = OptimizerOptions(lr=1e-3, clip=1.0)
    run = parallelize(model, cross_entropy, options, {"placement": placement | {"bucket": 0}}, world=world)
    tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(1))
    process = psutil.Process()
    for _ in range(WARM):
        run.step({"tokens": tokens})
    held = tensors()
    under_way, grown = run.mesh["z"].under_way, []
    for _ in range(WINDOWS):
        size = process.memory_info().rss
        for _ in range(STEPS):
            run.step({"tokens": tokens})
        grown.append(process.memory_info().rss - size)
    assert run.mesh["z"].under_way == under_way
    # Tensors are counted at the end: listing them takes megabytes.
    return dict(tensors() - held), min(grown), run.mesh["data"].under_way


@pytest.mark.parametrize(
    "placement",
    [{"z": 2, "shard": "parameters"}, {"z": 2, "shard": "optimizer"}, {"data": 2}],
    ids=["parameters", "optimizer", "data"],
)
def test_no_tensor_stays_and_no_rank_grows(gloo: Processes, placement: dict) -> None:
    for stayed, grown, under_way in gloo(2, train, placement, timeout=120):
        assert stayed == {}
        assert under_way == 0
        assert grown < GROWTH, f"grew by {grown / 2**20:.1f} MiB in {STEPS} steps"
