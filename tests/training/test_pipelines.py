"""A pipeline equals one process: loss, norm, gradients and weights to 1e-12, and every byte is predicted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from fourfold import wire
from fourfold.ledger import Flow
from fourfold.plan import Plan
from fourfold.training import checkpoint
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from plain import Work, assert_equal, gpt, on_threads, serial, stock_work, worst

ADAMW = OptimizerOptions(name="adamw", lr=0.02, eps=1e-4, weight_decay=0.1, clip=1.0, warmup=2, steps=4)
"""A key's bias has a gradient of exactly zero, so all of it is rounding, and AdamW divides rounding by `eps`."""


def plan_of(pipe: int, name: str = "1f1b", microbatches: int = 4, **placement: Any) -> dict[str, Any]:
    schedule = {"name": name, "microbatches": microbatches}
    return {"placement": {"pipe": pipe, "precision": "fp64", **placement}, "schedule": schedule}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pipe", "microbatches"), [(2, 2), (3, 4), (4, 5)])
def test_our_gpt(pipe: int, microbatches: int, name: str, dropout: float) -> None:
    work = Work(gpt(dropout))
    expected = serial(work)
    for found in on_threads(work, plan_of(pipe, name, microbatches)):
        assert_equal(found, expected)


ORDERS: dict[str, tuple[int, dict[str, Any]]] = {
    "interleaved": (2, {"microbatches": 4, "chunks": 3}),
    "breadth_first": (3, {"microbatches": 4, "chunks": 2}),
    "zb_h1": (3, {"microbatches": 4}),
    "zb_h2": (2, {"microbatches": 5}),
    "zb_1p": (2, {"microbatches": 4, "chunks": 2}),
    "zb_v": (2, {"microbatches": 4}),
    "v_half": (2, {"microbatches": 4}),
    "v_min": (3, {"microbatches": 5}),
    "hanayo": (2, {"microbatches": 4}),
    "chimera": (2, {"microbatches": 4}),
    "dualpipe": (2, {"microbatches": 4}),
    "dualpipev": (2, {"microbatches": 4}),
}


@pytest.mark.parametrize("name", ORDERS)
def test_every_order(name: str) -> None:
    work = Work(gpt(0.2))
    expected = serial(work)
    pipe, options = ORDERS[name]
    plan = {"placement": {"pipe": pipe, "precision": "fp64"}, "schedule": {"name": name, **options}}
    for found in on_threads(work, plan):
        assert_equal(found, expected)


READY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1f1b": ({"pipe": 3}, {"microbatches": 5, "ready": True, "in_flight": 4}),
    "zb_v": ({"pipe": 2}, {"microbatches": 4, "ready": True}),
    "message_driven": ({"pipe": 3}, {"microbatches": 5, "limit": 3}),
    "interleaved": ({"pipe": 2, "z": 2, "shard": "parameters", "data": 2}, {"microbatches": 4, "ready": True}),
    "gpipe": ({"pipe": 2, "tensor": {"algorithm": "4d", "y": 2}}, {"microbatches": 4, "ready": True}),
}


@pytest.mark.parametrize("name", READY)
def test_what_is_ready_first(name: str) -> None:
    work = Work(gpt(0.2))
    placement, options = READY[name]
    plan = {"placement": {**placement, "precision": "fp64"}, "schedule": {"name": name, **options}}
    for found in on_threads(work, plan):
        assert_equal(found, serial(work))


GRIDS: dict[str, dict[str, Any]] = {
    "data": {"pipe": 2, "data": 2},
    "optimizer": {"pipe": 2, "z": 2, "shard": "optimizer"},
    "gradients": {"pipe": 3, "z": 2, "shard": "gradients"},
    "parameters": {"pipe": 2, "z": 2, "data": 2, "shard": "parameters"},
    "recomputed": {"pipe": 3, "z": 2, "shard": "parameters", "recompute": "full"},
    "selective": {"pipe": 2, "recompute": "selective"},
    "x": {"pipe": 2, "tensor": {"algorithm": "4d", "x": 2}},
    "y": {"pipe": 2, "tensor": {"algorithm": "4d", "y": 3}},
    "x, y, z": {"pipe": 2, "tensor": {"algorithm": "4d", "x": 2, "y": 2, "z": 2}},
    "1d-sequence": {"pipe": 2, "tensor": {"algorithm": "1d-sequence", "y": 3}},
}


@pytest.mark.parametrize("grid", GRIDS)
def test_with_the_other_axes(grid: str) -> None:
    work = Work(gpt(0.2))
    expected = serial(work)
    for found in on_threads(work, plan_of(**GRIDS[grid])):
        assert_equal(found, expected)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_breadth_first_gathers_each_chunk_once_a_direction(recompute: str) -> None:
    work, microbatches = Work(gpt(0.2)), 4
    calls = {}
    for name in ("breadth_first", "interleaved"):
        plan = plan_of(2, name, microbatches, z=2, shard="parameters", recompute=recompute)
        outcomes = on_threads(work, plan)
        for found in outcomes:
            assert_equal(found, serial(work))
        calls[name] = [found.measured[Flow("z", "weight", "all_gather")].calls for found in outcomes]
    # Of three blocks the second and third lie on the second worker's chunks; the last one stays for its backward.
    assert max(calls["breadth_first"]) <= 2 * 2 + 2 < min(calls["interleaved"])


@pytest.mark.parametrize("cut", [(1, 6), (2, 5), (5, 2), (6, 1)])
def test_uneven_cuts(cut: tuple[int, ...]) -> None:
    work = Work(gpt(0.2, tied=False))
    expected = serial(work)
    for found in on_threads(work, plan_of(2, cut=cut)):
        assert_equal(found, expected)


STOCK = ("llama", "qwen3", "mistral", "mixtral", "gpt2", "opt", "bert", "vit")


@pytest.mark.parametrize("pipe", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", STOCK)
def test_stock_transformers(name: str, pipe: int) -> None:
    work = stock_work(name)
    expected = serial(work)
    for found in on_threads(work, plan_of(pipe, microbatches=4)):
        assert_equal(found, expected)


RESUMED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (plan_of(2, "interleaved", 4), plan_of(2)),
    (plan_of(2, "interleaved", 4), {"placement": {"precision": "fp64"}}),
    (plan_of(3, z=2, shard="parameters"), plan_of(2, "zb_v", 4, data=2)),
    ({"placement": {"z": 3, "shard": "optimizer", "precision": "fp64"}}, plan_of(2, "chimera", 4)),
]


@pytest.mark.parametrize("pair", range(len(RESUMED)))
def test_a_checkpoint_goes_on_under_another_plan(pair: int, tmp_path: Path) -> None:
    first, second = RESUMED[pair]
    work = Work(gpt(0.2), options=ADAMW)
    expected = serial(work)

    def half(world: wire.World, plan: dict[str, Any], steps: range, folder: Path) -> tuple[list[float], Any]:
        run = parallelize(work.fresh(), work.loss, work.options, plan, world=world, seed=1, example=work.batch(0))
        if steps.start:
            newest = checkpoint.latest(folder)
            assert newest is not None
            run.load(newest)
        losses = [run.step(work.batch(step)).loss for step in steps]
        if not steps.start:
            run.save(folder)
        state = run.logical_state()
        run.close()
        return losses, state

    one = wire.threads.launch(Plan.of(first).world, half, first, range(2), tmp_path)
    two = wire.threads.launch(Plan.of(second).world, half, second, range(2, 4), tmp_path)
    for (early, _), (late, weights) in itertools.product(one, two):
        assert early + late == pytest.approx(expected.losses, rel=1e-12, abs=0)
        assert worst(weights, expected.weights) <= 1e-11
