"""Forecasts of pipelines: time against the closed form, bytes against the run's, memory against the allocator."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from fourfold import wire
from fourfold.hardware import Cluster, Device, Link
from fourfold.models.gpt import GPT, Config
from fourfold.plan import Plan
from fourfold.planner import Subject, Traces, clock, forecast
from fourfold.planner.forecast import ForecastError, RefusedError, pipeline
from fourfold.planner.schedules import schedules
from fourfold.planner.stage import Stage
from fourfold.planner.trace import Settings
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.run import parallelize
from plain import Work, gpt

DEVICE = Device("cpu_test", 2**34, 1e10, {"fp32": 1e11, "fp64": 5e10}, "none")
LINK = Link("none", 1e-5, 1e9)
CLUSTER = Cluster(1, 16, DEVICE, LINK, LINK)
INSTANT = Link("instant", 0.0, 1e30)
UNCONNECTED = Cluster(1, 16, DEVICE, INSTANT, INSTANT)
"""Transfers take no time."""

WORK = Work(gpt(0.2))


@functools.cache
def tiny() -> Traces:
    return Traces(Subject(WORK.fresh, WORK.loss, WORK.batch(0), WORK.rows))


def plan_of(pipe: int, name: str = "1f1b", microbatches: int = 4, chunks: int = 0, **placement: Any) -> dict[str, Any]:
    schedule: dict[str, Any] = {"name": name, "microbatches": microbatches}
    if chunks:
        schedule["chunks"] = chunks
    return {"placement": {"pipe": pipe, **placement}, "schedule": schedule}


# ---- time


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pipe", "microbatches"), [(2, 2), (3, 7), (4, 5)])
def test_even_stages_take_the_closed_form(pipe: int, microbatches: int, name: str) -> None:
    found = pipeline(tiny(), UNCONNECTED, Plan.of(plan_of(pipe, name, microbatches)))
    for rows in set(found.rows):
        found.known[found.bounds, rows, clock.LIKELY] = [Stage(forward=2.0, backward=3.0) for _ in range(pipe)]
    makespan = found.timeline(clock.LIKELY).makespan
    assert makespan == pytest.approx((microbatches + pipe - 1) * 5.0, rel=1e-12)


def test_a_backward_is_its_halves() -> None:
    found = pipeline(tiny(), UNCONNECTED, Plan.of(plan_of(2, "zb_h1")))
    for rows in set(found.rows):
        found.known[found.bounds, rows, clock.LIKELY] = [Stage(forward=1.0, backward=2.0, weight=1.0)] * 2
    # ZB-H1 with equal passes: a third of 1F1B's bubble of (p - 1)(f + b) = 3 (Qi et al. 2023, section 2)
    assert found.timeline(clock.LIKELY).makespan == pytest.approx(4 * 3.0 + 1.0)


@pytest.mark.parametrize("cut", [(1, 6), (3, 4), (1, 1, 5), (1,) * 7])
def test_stages_are_the_whole_step(cut: tuple[int, ...]) -> None:
    found = pipeline(tiny(), CLUSTER, Plan.of(plan_of(len(cut), "1f1b", 7, cut=cut)))
    rows = found.rows[0]
    whole = tiny().tape(Settings(rows))
    costs = clock.operator_seconds(whole, CLUSTER, "fp32", clock.LIKELY)
    expected = sum(costs[event.number] for one in whole.segments for event in one.events if event.kind == "op")
    table = found.stage(clock.LIKELY)[rows]
    assert sum(stage.forward + stage.backward for stage in table) == pytest.approx(expected, rel=1e-9)
    assert sum(stage.flops for stage in table) == clock.flops(whole)


def test_products_of_weights_are_as_dear_as_those_forward() -> None:
    """Every linear has one product forward, and one for its weight backward: the same operations, with other shapes."""
    config = Config(vocabulary=64, context=16, layers=3, width=32, heads=4, tied=False)
    batch = {name: torch.zeros(2, 16, dtype=torch.int64) for name in ("tokens", "targets")}
    traces = Traces(Subject(lambda: GPT(config), cross_entropy, batch, 8))
    flat = dataclasses.replace(DEVICE, memory_bandwidth=1e30)
    found = pipeline(traces, dataclasses.replace(CLUSTER, device=flat), Plan.of(plan_of(2, "zb_h1")))
    nothing = dataclasses.replace(clock.LIKELY, launch=0.0)
    tape = found.tapes[2]
    per = DEVICE.peak("fp32") * min(1.0, DEVICE.efficiency)
    weights = sum(numel for name, numel in _linears(config).items()) * 2 * 2 * 16
    assert sum(one.weight for one in found.stage(nothing)[2]) * per == pytest.approx(weights, rel=1e-9)
    assert tape.rows == 2


def _linears(config: Config) -> dict[str, int]:
    modules = GPT(config).named_modules()
    return {path: one.weight.numel() for path, one in modules if isinstance(one, torch.nn.Linear)}


def test_the_step_is_the_makespan_and_what_comes_after() -> None:
    one = forecast(tiny(), CLUSTER, Plan.of(plan_of(3, "1f1b", 5)))
    found = pipeline(tiny(), CLUSTER, one.plan)
    makespan = found.timeline(clock.LIKELY).makespan
    assert one.timing.compute + one.timing.exposed["bubble"] == pytest.approx(makespan)
    assert one.timing.total == pytest.approx(makespan + one.timing.update + one.timing.exposed["pipe"])
    assert one.low < one.timing.total < one.high


# ---- bytes

BYTES: dict[str, dict[str, Any]] = {
    "1f1b": plan_of(2),
    "uneven rows": plan_of(4, "gpipe", 5),
    "interleaved": plan_of(2, "interleaved", 4, chunks=3),
    "zb_v": plan_of(2, "zb_v"),
    "chimera": plan_of(2, "chimera"),
    "data": plan_of(2, data=2),
    "optimizer": plan_of(2, z=2, shard="optimizer"),
    "gradients": plan_of(3, z=2, shard="gradients"),
    "parameters": plan_of(2, z=2, data=2, shard="parameters"),
    "kept": plan_of(2, "breadth_first", 4, chunks=2, z=2, shard="parameters"),
    "recomputed": plan_of(3, z=2, shard="parameters", recompute="full"),
    "x": plan_of(2, tensor={"algorithm": "4d", "x": 2}),
    "1d-sequence": plan_of(2, tensor={"algorithm": "1d-sequence", "y": 3}),
}


def _bytes(world: wire.World, plan: dict[str, Any]) -> tuple[int, int, dict[Any, Any], dict[Any, Any]]:
    run = parallelize(WORK.fresh(), WORK.loss, WORK.options, plan, world=world, seed=1, example=WORK.batch(0))
    run.step(WORK.batch(0))
    told, metered = run.forecast().traffic(), run.ledger.traffic(0)
    place = run.mesh["pipe"].index
    run.close()
    first, second = (
        {flow: (one.calls, one.bytes) for flow, one in each.items() if flow.kind != "control"}
        for each in (told, metered)
    )
    return world.rank, place, first, second


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_what_a_run_says(name: str) -> None:
    plan = {**BYTES[name], "placement": {**BYTES[name]["placement"], "precision": "fp64"}}
    found = forecast(tiny(), CLUSTER, Plan.of(plan))
    each = wire.threads.launch(found.plan.world, _bytes, plan)
    for one in found.ranks:
        _, _, told, metered = next(entry for entry in each if entry[1] == one.worker)
        predicted = {flow: (count.calls, count.bytes) for flow, count in one.ledger.traffic().items()}
        assert predicted == told == metered


CONFIG = Config(vocabulary=768, context=64, layers=6, width=96, heads=4)
ROWS = 16


def batch(rows: int) -> dict[str, torch.Tensor]:
    tokens = torch.arange(rows * 64).view(rows, 64) % 768
    return {"tokens": tokens, "targets": tokens}


@functools.cache
def small() -> Traces:
    return Traces(Subject(lambda: GPT(CONFIG), cross_entropy, batch(2), ROWS))


# ---- schedules


@functools.cache
def _ranked() -> Any:
    return schedules(small(), UNCONNECTED, world=2)


def test_schedules_are_ranked() -> None:
    found = _ranked()
    assert found.ok
    times = [one.seconds for one in found.laid if not one.bound]
    assert times == sorted(times)
    assert {one.staleness for one in found.laid} == {0}
    by = {one.plan.schedule.name: one for one in found.laid}
    assert by["zb_h1"].seconds < by["1f1b"].seconds <= by["gpipe"].seconds * (1 + 1e-9)
    assert by["1f1b"].memory < by["gpipe"].memory
    assert by["gpipe"].flight == (8, 8) and by["1f1b"].flight == (2, 1)
    assert by["interleaved"].sent > by["1f1b"].sent
    assert "bubble" in by["gpipe"].behind(found.best) and "holds" in by["gpipe"].behind(found.best)


def test_figures_of_a_schedule_are_those_of_its_forecast() -> None:
    best = _ranked().best
    one = forecast(small(), UNCONNECTED, best.plan)
    assert one.timing.total == pytest.approx(best.seconds)
    assert one.peak == best.memory
    assert sum(rank.ledger.sent(axis="pipe") for rank in one.ranks) == best.sent


def test_what_holds_too_much_is_last() -> None:
    by = {one.plan.schedule.name: one for one in _ranked().laid}
    budget = (by["1f1b"].memory + by["gpipe"].memory) // 2
    tight = dataclasses.replace(UNCONNECTED, device=dataclasses.replace(DEVICE, memory=budget))
    found = schedules(small(), tight, world=2)
    by = {one.plan.schedule.name: one for one in found.laid}
    assert not by["1f1b"].bound
    assert by["gpipe"].behind(found.best).startswith("memory: ")
    assert [bool(one.bound) for one in found.laid] == sorted(bool(one.bound) for one in found.laid)


def test_too_few_microbatches() -> None:
    found = schedules(small(), CLUSTER, Plan.of(plan_of(4, microbatches=2)))
    assert not found.ok
    assert all("micro-batches" in one.bound or "never empties its pipeline" in one.bound for one in found.laid)


def test_one_worker_is_no_pipeline() -> None:
    with pytest.raises(ForecastError, match="at least 2 workers"):
        schedules(small(), CLUSTER, world=1)


def test_the_chosen_cut_is_no_slower_than_the_estimated() -> None:
    plan = Plan.of(plan_of(3, "1f1b", 8))
    best = next(one for one in schedules(small(), UNCONNECTED, plan).laid if one.plan.schedule.name == "1f1b")

    def slowest(plan: Plan) -> float:
        found = pipeline(small(), UNCONNECTED, plan)
        return max(one.forward + one.backward for one in found.stage(clock.LIKELY)[found.rows[0]])

    assert best.plan.placement.cut is not None
    assert slowest(best.plan) <= slowest(plan)


# ---- refusals


def test_more_stages_than_layers() -> None:
    with pytest.raises(RefusedError, match="8 stages want at least as many layers, found 7"):
        forecast(tiny(), CLUSTER, Plan.of(plan_of(8, "1f1b", 8)))


def test_a_cut_that_does_not_add_up() -> None:
    with pytest.raises(RefusedError, match=r"plan\.placement\.cut: expected 2 numbers"):
        forecast(tiny(), CLUSTER, Plan.of(plan_of(2, cut=(3, 3))))
