"""Overlap and bucketing change when things happen, never a bit. At least three ranks: two cannot show a difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fourfold.training.optimizer import OptimizerOptions
from plain import Outcome, Work, gpt, on_threads, rank

ADAM = OptimizerOptions(lr=1e-2, clip=0.5)


def work() -> Work:
    return Work(gpt(0.2, dtype=torch.float32), rows=6, steps=3, options=ADAM)


def plan(overlap: bool, bucket: int, level: str, data: int = 1) -> dict[str, Any]:
    cut = {"data": 3} if level == "none" else {"z": 3, "data": data}
    placement = {**cut, "shard": level, "overlap": overlap, "bucket": bucket}
    return {"placement": placement, "sync": {"overlap": overlap}, "schedule": {"microbatches": 2}}


def assert_same_bits(found: Outcome, expected: Outcome) -> None:
    assert found.losses == expected.losses
    for name, tensor in expected.weights.items():
        assert torch.equal(found.weights[name], tensor), name


@pytest.mark.parametrize("level", ["none", "optimizer", "gradients", "parameters"])
def test_overlap_and_bucketing_on_threads(level: str) -> None:
    expected = on_threads(work(), plan(True, 0, level))[0]
    for overlap, bucket in ((False, 0), (True, 1 << 13), (False, 1 << 30)):
        for found in on_threads(work(), plan(overlap, bucket, level)):
            assert_same_bits(found, expected)


def test_shards_and_replicas_on_threads() -> None:
    expected = on_threads(work(), plan(True, 0, "parameters", data=2))[0]
    for found in on_threads(work(), plan(False, 1 << 13, "parameters", data=2)):
        assert_same_bits(found, expected)


def trained(world: Any, settings: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    outcome = rank(world, work(), settings)
    return outcome.losses, outcome.weights


def test_overlap_and_bucketing_on_gloo(gloo: Any) -> None:
    """Real sockets, and the same bits as threads."""
    for level in ("none", "parameters"):
        expected = on_threads(work(), plan(True, 0, level))[0]
        for overlap, bucket in ((True, 0), (False, 1 << 13)):
            for losses, weights in gloo(3, trained, plan(overlap, bucket, level)):
                assert_same_bits(Outcome(losses=losses, weights=weights), expected)
