"""The search over grids finds the one that moves least where links bind, and keeps to what is fast where none do."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fourfold.hardware import Cluster, Device, Link
from fourfold.models.gpt import GPT, Config
from fourfold.plan import Plan
from fourfold.planner import ForecastError, Subject, Traces, forecast, plan
from fourfold.planner.grids import grids, obstacle, weigh
from fourfold.planner.here import LOOPBACK
from fourfold.planner.search import CHUNKS, MOST_TRACED, Found, factors, jobs, look, network
from fourfold.planner.tolls import Factors
from fourfold.training.losses.cross_entropy import cross_entropy

SEQUENCE = 8


def subject(rows: int = 64, width: int = 256, heads: int = 64, layers: int = 2, vocabulary: int = 128) -> Subject:
    config = Config(vocabulary=vocabulary, context=SEQUENCE, layers=layers, width=width, heads=heads)
    tokens = {"tokens": torch.zeros(2, SEQUENCE + 1, dtype=torch.int64)}
    return Subject(lambda: GPT(config), cross_entropy, tokens, rows, tokens_per_row=SEQUENCE)


def slow(devices: int, memory: int = 2**34) -> Cluster:
    """Links of 25 kB/s without delay between devices that compute in no time: a step is its bytes."""
    link = Link("slow", 0.0, 25e3)
    return Cluster(devices, 1, Device("cpu_made_up", memory, 1e15, {"fp32": 1e18}, "slow"), link, link)


@pytest.fixture(scope="module")
def traces() -> Traces:
    return Traces(subject())


def fewest(traces: Traces, world: int) -> int:
    """Bytes of the grid that sends least, of all grids, each traced."""
    found = []
    for grid in grids(world):
        shards = ("parameters", "optimizer") if grid.z > 1 else ("none",)
        for shard in shards:
            chosen = Plan.of({"placement": {**grid.settings(), "shard": shard}})
            try:
                found.append(forecast(traces, slow(world), chosen).ledger.sent())
            except ForecastError as error:
                raise AssertionError(f"{grid}: every grid of {world} ranks can be forecast") from error
    return min(found)


def is_4d(plan: Plan) -> bool:
    return plan.placement.tensor is not None and plan.placement.tensor.name in ("4d", "1d_sequence")


def test_the_grid_of_8_ranks_moves_the_fewest_bytes_of_all(traces):
    found = look(traces, slow(8))
    best = found.forecasts[0]
    assert best.plan.placement.grid.cuts_features
    assert best.ledger.sent() == fewest(traces, 8)


@pytest.mark.parametrize(("world", "least"), [(12, Factors(1, 4)), (16, Factors(2, 4)), (64, Factors(2, 8))])
def test_no_grid_of_more_ranks_moves_fewer_bytes_than_the_one_found(traces, world, least):
    """By closed form, of all grids and jobs, those too that the search thought not worth a trace.

    With y ranks over heads and x over the residual, the rest of the ranks cut rows. 12 ranks do not have equal rows:
    the trace is of one rank, the closed form of the rank with the most, and they differ by some bytes of 5 million.
    """
    likeness = network(traces)
    assert likeness is not None
    weighed = [
        weigh(likeness, slow(world), grid, job)
        for grid in grids(world)
        for job in jobs(world, traces.subject.rows, ("fp32",))
        if not obstacle(likeness, grid, job)
    ]
    assert {one.grid for one in weighed} >= {Factors(1, 1, 1, world), Factors(world), Factors(1, world)}
    fewest = min(one.bytes for one in weighed)
    best = look(traces, slow(world)).forecasts[0]
    assert factors(best.plan) in {one.grid for one in weighed if one.bytes == fewest}
    assert factors(best.plan)[:2] == least[:2]
    assert abs(best.ledger.sent() - fewest) <= 1e-4 * fewest


@pytest.mark.parametrize("world", [16, 64])
def test_on_more_ranks_only_the_most_promising_are_traced(traces, world):
    found = look(traces, slow(world))
    best = found.forecasts[0]
    traced = {factors(one.plan) for one in found.forecasts if one.plan.placement.grid.cuts_features and is_4d(one.plan)}
    assert factors(best.plan) in traced and 0 < len(traced) <= MOST_TRACED
    every = {grid for grid in grids(world) if grid.x * grid.y > 1}
    assert traced | {one.ranked.grid for one in found.estimated} == every
    assert not traced & {one.ranked.grid for one in found.estimated}
    assert best.ledger.sent() == min(one.ledger.sent() for one in found.forecasts)
    assert all(one.behind for one in found.estimated)
    one_d = Plan.of({"placement": {"tensor": {"algorithm": "1d", "y": world}}})
    assert best.plan.placement.grid.y < world
    assert best.ledger.sent() < forecast(traces, slow(world), one_d).ledger.sent()


def test_grids_that_are_not_powers_of_two(traces):
    told: list[str] = []
    found = look(traces, slow(6), tell=told.append)
    plans = [line for line in told if line.startswith("plan ")]
    assert plans[0] == f"plan 1 of {len(plans)}, data 6"
    assert any(line.startswith("grid 1 of ") for line in told)
    assert {Factors(3, 2), Factors(1, 6), Factors(2, 1, 3)} <= _all(found)
    assert factors(found.forecasts[0].plan).y in (2, 3)


def test_square_algorithms_are_ranked_with_the_others_or_the_note_says_why_not(traces):
    found = look(traces, slow(8))
    ranked = [one.plan.placement.tensor.name for one in found.forecasts if one.plan.placement.tensor is not None]
    assert {"2_5d", "3d"} <= set(ranked) | {note.split()[0].replace(".", "_") for note in found.left_out}
    assert any(name in ranked for name in ("2_5d", "3d"))
    assert [one.timing.total for one in found.forecasts if one.fits] == sorted(
        one.timing.total for one in found.forecasts if one.fits
    )
    outlook = plan(traces, slow(4))
    assert "(2d)" in outlook.text() or any(note.startswith("2d q 2: ") for note in outlook.notes)


def test_chunks_are_chosen_where_sums_and_products_take_as_long():
    """Links of no delay, and one row, which replicas cannot share: pieces travel while others are multiplied."""
    link = Link("cable", 0.0, 1e7)
    wide = Traces(subject(rows=1, width=256, heads=8))
    best = look(wide, Cluster(1, 2, Device("cpu_made_up", 2**30, 1e13, {"fp32": 1e9}, "cable"), link, link)).forecasts
    assert best[0].plan.placement.chunks in CHUNKS
    assert replace(best[0].plan.placement, chunks=1) in [one.plan.placement for one in best]
    assert all(one.plan.placement.chunks == 1 for one in look(wide, slow(2)).forecasts)  # nothing to hide behind


def _all(found: Found) -> set[Factors]:
    return {one.ranked.grid for one in found.estimated} | {factors(one.plan) for one in found.forecasts}


def test_small_models_on_cores_keep_to_plans_without_grids():
    device = Device("cpu_here", 2**33, 1e10, {"fp32": 1e11}, LOOPBACK.name, efficiency=0.85)
    small = Traces(subject(rows=8, width=64, heads=4))
    for workers in (2, 4):
        found = look(small, Cluster(1, workers, device, LOOPBACK, LOOPBACK))
        assert found.forecasts[0].plan.placement.tensor is None
        assert found.estimated


def test_where_nothing_else_fits_a_grid_does():
    wide = Traces(subject(rows=1, width=256, heads=4))
    alone = forecast(wide, slow(1), Plan())
    found = look(wide, slow(2, memory=int(0.7 * alone.peak)))
    assert found.forecasts[0].fits
    assert found.forecasts[0].plan.placement.grid.cuts_features
    assert all(one.bound for one in found.forecasts if not one.plan.placement.grid.cuts_features)


def test_the_table_of_grids_and_its_json(traces):
    outlook = plan(traces, slow(8))
    text = outlook.text()
    assert "grids, each by its best plan" in text and "estimated by formula alone" in text
    assert "(4d)" in text or "(1d-sequence)" in text
    assert "sends over" in text and "loses to the best" in text
    plain = json.loads(json.dumps(outlook.to_dict()))
    assert len(plain["estimated"]) == len(outlook.estimated) > 0
    one = plain["estimated"][0]
    assert set(one["grid"]) == {"x", "y", "z", "data"} and one["behind"] and one["memory"]["total"] > 0
    sent = {entry["axis"] for entry in plain["forecasts"][0]["bytes"]}
    assert sent & {"x", "y"}


def test_a_grid_without_room_for_its_heads_says_so_in_a_table_without_times():
    outlook = plan(subject(rows=8, width=48, heads=2), slow(3))
    reasons = {tuple(one.ranked.grid): one.behind for one in outlook.estimated}
    why = "attention.qkv: 2 heads cannot be cut over y = 3"
    assert reasons[Factors(1, 3)] == why
    times, _, impossible = outlook.text().partition("grids that cannot be")
    (row,) = [line for line in impossible.splitlines() if "x 1 y 3 " in line]
    assert row.strip("\N{BOX DRAWINGS LIGHT VERTICAL} ").endswith(why) and " ms" not in row
    assert why not in times


def test_a_model_that_cannot_be_cut_says_why():
    from torch import nn

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x)

    lonely = Subject(Pair, lambda model, batch: (model(batch["x"]).sum(), 1), {"x": torch.ones(2, 8)}, 8)
    outlook = plan(lonely, slow(2))
    assert outlook.ok and not outlook.estimated
    assert any(note.startswith("no features are cut over x and y: ") for note in outlook.notes)
