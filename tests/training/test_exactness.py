"""Parallel equals serial: loss, gradients and weights, in float64, to 1e-12; and every byte is predicted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from plain import Work, assert_equal, gpt, lift_casts, on_threads, serial, stock

LEVELS = ("none", "optimizer", "gradients", "parameters")


def plan_of(level: str, ranks: int, microbatches: int, recompute: str, **more: Any) -> dict[str, Any]:
    """Replicas, or shards over z."""
    cut = {"data": ranks} if level == "none" else {"z": ranks}
    placement = {**cut, "shard": level, "recompute": recompute, "precision": "fp64", **more}
    return {"placement": placement, "schedule": {"microbatches": microbatches}}


SUITE = [
    ("none", 1, 1, "none"),
    ("none", 2, 2, "selective"),
    ("none", 3, 1, "full"),
    ("optimizer", 2, 1, "none"),
    ("optimizer", 3, 2, "full"),
    ("optimizer", 4, 1, "selective"),
    ("gradients", 1, 2, "none"),
    ("gradients", 3, 1, "selective"),
    ("gradients", 4, 2, "full"),
    ("parameters", 2, 2, "none"),
    ("parameters", 3, 1, "full"),
    ("parameters", 4, 2, "selective"),
]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("level", "ranks", "microbatches", "recompute"), SUITE)
def test_our_gpt(level: str, ranks: int, microbatches: int, recompute: str, dropout: float) -> None:
    work = Work(gpt(dropout))
    expected = serial(work)
    for found in on_threads(work, plan_of(level, ranks, microbatches, recompute)):
        assert_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "level", "ranks", "microbatches", "recompute"),
    [
        ("llama", "parameters", 3, 2, "full"),
        ("qwen3", "parameters", 2, 1, "selective"),
        ("gpt2", "optimizer", 3, 2, "none"),
        ("opt", "gradients", 2, 2, "full"),
        ("gpt2", "none", 3, 1, "selective"),
    ],
)
def test_stock_transformers(name: str, level: str, ranks: int, microbatches: int, recompute: str) -> None:
    work = Work(stock(name), prepare=lift_casts)
    expected = serial(work)
    for found in on_threads(work, plan_of(level, ranks, microbatches, recompute)):
        assert_equal(found, expected)


@pytest.mark.parametrize("level", ["optimizer", "gradients", "parameters"])
def test_shards_and_replicas_together(level: str) -> None:
    work = Work(gpt(0.2))
    expected = serial(work)
    plan = {"placement": {"z": 2, "data": 2, "shard": level, "precision": "fp64"}, "schedule": {"microbatches": 2}}
    for found in on_threads(work, plan):
        assert_equal(found, expected)


def test_fewer_rows_than_ranks() -> None:
    work = Work(gpt(0.2), rows=2)
    expected = serial(work)
    for found in on_threads(work, plan_of("parameters", 4, 1, "none")):
        assert_equal(found, expected)


def test_fewer_weight_rows_than_ranks() -> None:
    """Biases and norms of 12 rows over 13 ranks: some ranks hold none."""
    work = Work(gpt(), rows=13, steps=2)
    expected = serial(work)
    for found in on_threads(work, plan_of("parameters", 13, 1, "none")):
        assert_equal(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("model", ["gpt", "llama", "qwen3", "gpt2", "opt"])
@pytest.mark.parametrize(
    ("level", "ranks", "microbatches", "recompute"),
    list(itertools.product(LEVELS, (1, 2, 3, 4), (1, 2), ("none", "selective", "full"))),
)
def test_twenty_steps(model: str, level: str, ranks: int, microbatches: int, recompute: str) -> None:
    """The whole matrix, dropout on."""
    plain = gpt(0.2) if model == "gpt" else stock(model)
    work = Work(plain, steps=20, prepare=lift_casts)
    expected = _remembered(model, work)
    for found in on_threads(work, plan_of(level, ranks, microbatches, recompute)):
        assert_equal(found, expected)


_expected: dict[str, Any] = {}


def _remembered(model: str, work: Work) -> Any:
    if model not in _expected:
        _expected[model] = serial(work)
    return _expected[model]
