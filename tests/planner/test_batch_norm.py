"""A convnet with batch norm, planned: its statistics in bytes and seconds, and its memory against real ranks."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.hardware import Cluster, Device, Link
from fourfold.plan import Plan
from fourfold.planner import Subject, Traces, forecast, measured_peak
from fourfold.planner.forecast import Forecast
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from plain import at_rest

ROWS, WIDTH = 8, 32
LINK = Link("none", 1e-5, 1e9)
CLUSTER = Cluster(1, 4, Device("cpu_test", 2**34, 1e10, {"fp32": 1e11}, "none"), LINK, LINK)


class Block(nn.Module):
    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(WIDTH) if normed else nn.Identity()
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(WIDTH) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def resnet(normed: bool = True) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(normed) for _ in range(4)))
    return nn.Sequential(nn.Conv2d(3, WIDTH, 3), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))


def classified(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch["images"]), batch["labels"], reduction="sum"), len(batch["labels"])


def batch(rows: int) -> dict[str, Tensor]:
    return {"images": torch.ones(rows, 3, 24, 24), "labels": torch.arange(rows)}


@functools.cache
def traces(normed: bool = True) -> Traces:
    return Traces(Subject(functools.partial(resnet, normed), classified, batch(2), ROWS))


def planned(placement: dict[str, Any], *, normed: bool = True) -> Forecast:
    return forecast(traces(normed), CLUSTER, Plan.of({"placement": placement, "schedule": {"microbatches": 2}}))


@pytest.mark.parametrize(("recompute", "gathers"), [("none", 1), ("full", 2)])
def test_statistics_are_counted_and_take_time(recompute: str, gathers: int) -> None:
    placement = {"z": 2, "data": 2, "shard": "optimizer", "recompute": recompute}
    found, without = planned(placement), planned(placement, normed=False)
    norms, microbatches, ranks = 8, 2, 4
    ledger = found.ledger
    told = (2 * WIDTH + 1) * 8 * (ranks - 1)  # mean, squared deviations and a count, to every other rank
    assert ledger.sent(axis="z+data", kind="activation") == norms * microbatches * gathers * told
    summed = 2 * WIDTH * 8 * 2 * (ranks - 1) // ranks  # an all-reduce of two sums a channel
    assert ledger.sent(axis="z+data", kind="activation-gradient") == norms * microbatches * summed
    assert found.timing.exposed["z+data"] > norms * microbatches * (gathers + 1) * LINK.latency
    assert "z+data" not in without.timing.exposed
    assert planned({"recompute": recompute}).ledger.sent(axis="z+data") == 0


def body(world: Any, placement: dict[str, Any]) -> tuple[int, int, int]:
    """(bytes at rest, peak above them, bytes of statistics) of a steady step."""
    run = parallelize(resnet(), classified, OptimizerOptions(), {"placement": placement}, world=world)
    data = batch(ROWS)
    for _ in range(2):
        run.step(data)
    gc.collect()
    peak = measured_peak(lambda: run.step(data)).peak
    return at_rest(run), peak, run.ledger.sent(2, axis="z+data") - run.ledger.sent(2, axis="z+data", kind="control")


@pytest.mark.parametrize("placement", [{"data": 2}, {"z": 2, "shard": "parameters", "recompute": "full"}], ids=str)
def test_memory_and_bytes_of_two_ranks(gloo: Any, placement: dict[str, Any]) -> None:
    resting, peak, sent = gloo(2, body, placement)[0]
    found = forecast(traces(), CLUSTER, Plan.of({"placement": placement}))
    of_the_batch = sum(tensor.nbytes for tensor in batch(ROWS // 2).values())
    assert (found.peak - of_the_batch) / (resting + peak) == pytest.approx(1, abs=0.05)
    assert found.ledger.sent(axis="z+data") == sent
