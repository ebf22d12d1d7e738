from __future__ import annotations

import copy
import json

import pytest
import torch

from fourfold.hardware import Cluster, Device, Link
from fourfold.models.gpt import GPT, Config
from fourfold.plan import Plan
from fourfold.planner import ForecastError, Outlook, Subject, Traces, clock, forecast, here, plan, search
from fourfold.planner.search import candidates
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from fourfold.wire import threads

CONFIG = Config(vocabulary=96, context=16, layers=4, width=32, heads=4)
ROWS = 8
TOKENS = {"tokens": torch.zeros(ROWS, 17, dtype=torch.int64)}


def machine(devices: int = 4, memory: int = 2**30, bandwidth: float = 1e9) -> Cluster:
    link = Link("cable", 1e-5, bandwidth)
    return Cluster(1, devices, Device("cpu_made_up", memory, 1e10, {"fp32": 1e11}, "cable"), link, link)


@pytest.fixture(scope="module")
def traces() -> Traces:
    return Traces(
        Subject(lambda: GPT(CONFIG), cross_entropy, {"tokens": TOKENS["tokens"][:2]}, ROWS, tokens_per_row=16)
    )


def run_once(world, model, settings):
    run = parallelize(copy.deepcopy(model), cross_entropy, OptimizerOptions(), Plan.of(settings), world=world)
    run.step(TOKENS)
    return {
        tuple(flow): (one.calls, one.bytes) for flow, one in run.ledger.traffic(0).items() if flow.kind != "control"
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"placement": {"z": 3, "shard": "parameters"}, "schedule": {"name": "accumulate", "microbatches": 2}},
        {"placement": {"z": 2, "shard": "gradients"}, "schedule": {"name": "accumulate", "microbatches": 2}},
        {"placement": {"z": 2, "shard": "optimizer", "data": 2}},
        {"placement": {"z": 2, "shard": "parameters", "data": 2, "precision": "bf16"}},
        {"placement": {"z": 2, "shard": "parameters", "bucket": 100_000}},
        {"placement": {"data": 3}},
    ],
    ids=str,
)
def test_bytes_are_those_that_a_run_meters(traces, settings):
    chosen = Plan.of(settings)
    metered = threads.launch(chosen.world, run_once, GPT(CONFIG), settings)[0]
    said = forecast(traces, machine(), chosen).ledger
    assert {tuple(flow): (one.calls, one.bytes) for flow, one in said.traffic().items()} == metered


def test_flops_are_six_a_weight_and_token_and_attention(traces):
    found = forecast(traces, machine(), Plan())
    products = 12 * 32 * 32 * 4 + 96 * 32  # weights of the linears, and of the tied head
    attention = 4 * (4 * 16 * 16 * 32) * 3.5  # four layers, forward and 2.5 times that in backward
    assert found.ledger.notes["flops"] == ROWS * (6 * 16 * products + attention)


def test_recomputation_costs_operations_and_saves_activations(traces):
    plain, selective, full = (
        forecast(traces, machine(), Plan.of({"placement": {"recompute": level}}))
        for level in ("none", "selective", "full")
    )
    assert plain.ledger.notes["flops"] < selective.ledger.notes["flops"] < full.ledger.notes["flops"]
    assert plain.peak > selective.peak > full.peak


def test_categories_add_up_and_states_are_cut(traces):
    cut, whole = (
        forecast(traces, machine(), Plan.of({"placement": placement}))
        for placement in ({"z": 4, "shard": "parameters"}, {"data": 4})
    )
    assert whole.peak == whole.ledger.notes["memory peak"]
    for category in ("parameters", "optimizer"):
        quarter = whole.ledger.memory[category] / 4
        assert quarter <= cut.ledger.memory[category] <= 1.05 * quarter  # segments are padded to a cache line


def test_more_ranks_than_devices_are_refused(traces):
    with pytest.raises(ForecastError, match="needs 8 devices, and the machine has 4"):
        forecast(traces, machine(4), Plan.of({"placement": {"data": 8}}))


def test_what_binds_is_said(traces):
    small = forecast(traces, machine(memory=300_000), Plan())
    assert not small.fits
    assert small.bound.startswith("memory: ")
    assert "most of it is activations" in small.bound
    thin = forecast(
        traces, machine(8), Plan.of({"placement": {"data": 8}, "schedule": {"name": "accumulate", "microbatches": 2}})
    )
    assert thin.bound == "rows: 8 ranks x 2 micro-batches, and the batch has 8: some ranks would compute nothing"
    alone = forecast(traces, machine(1), Plan.of({"schedule": {"name": "accumulate", "microbatches": 9}}))
    assert alone.bound == "rows: 1 rank x 9 micro-batches, and the batch has 8: some ranks would compute nothing"


def test_search_ranks_what_fits_and_explains_the_rest(traces):
    everything = search(traces, machine(), world=4)
    whole = [one.plan for one in everything if one.plan.placement.tensor is None]
    assert set(whole) == set(candidates(4, ROWS, precisions=("fp32",))) and len(set(whole)) == len(whole)
    assert all(one.fits for one in everything)
    times = [one.timing.total for one in everything]
    assert times == sorted(times)
    budget = sorted(one.peak for one in everything)[len(everything) // 2]
    ranked = search(traces, machine(memory=budget), world=4)
    fits = [one.fits for one in ranked]
    assert fits == sorted(fits, reverse=True) and True in fits and False in fits
    assert all(one.bound for one in ranked if not one.fits)


def test_degrees_need_not_be_powers_of_two():
    found = {(one.placement.data, one.placement.z) for one in candidates(6, 6, precisions=("fp32",))}
    assert found == {(6, 1), (3, 2), (2, 3), (1, 6)}


def test_slow_links_show_as_exposed_time(traces):
    chosen = Plan.of({"placement": {"z": 4, "shard": "parameters"}})
    fast, slow = (forecast(traces, machine(bandwidth=rate), chosen) for rate in (1e12, 1e7))
    assert slow.timing.exposed["z"] > 10 * fast.timing.exposed["z"]
    assert slow.timing.compute == fast.timing.compute
    assert slow.low < slow.timing.total < slow.high


def test_without_overlap_everything_is_waited_for(traces):
    settings = {"placement": {"z": 4, "shard": "parameters", "overlap": False}}
    timing = forecast(traces, machine(bandwidth=1e8), Plan.of(settings)).timing
    assert sum(timing.hidden.values()) == pytest.approx(0, abs=1e-12)
    assert timing.stretched == pytest.approx(0, abs=1e-12)


def test_the_better_assumptions_are_the_faster_ones():
    assert clock.BEST.gemm > clock.LIKELY.gemm > clock.WORST.gemm
    assert clock.BEST.slowdown < clock.LIKELY.slowdown < clock.WORST.slowdown


def test_outlook_in_words_and_as_json(traces):
    peaks = sorted(one.peak for one in search(traces, machine(), world=2))
    middle = peaks[len(peaks) // 2]
    outlook = plan(traces, machine(memory=middle), world=2)
    assert isinstance(outlook, Outlook)
    text = outlook.text()
    assert "plans that fit, fastest first" in text
    assert "what bound it" in text and "memory: " in text
    plain = json.loads(json.dumps(outlook.to_dict()))
    assert outlook.best is not None and plain["best"] == outlook.best.to_dict()
    assert len(plain["forecasts"]) == len(outlook.forecasts)
    nothing = plan(traces, machine(memory=1000), Plan())
    assert not nothing.ok and nothing.best is None and "no plan fits" in nothing.text()


def test_recalled_numbers_are_named(traces):
    outlook = plan(traces, Cluster.parse("1x rtx4090"), Plan())
    assert "not checked against a source: memory" in outlook.text()


def test_here_reads_what_doctor_measured_and_shares_cores(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probed = here()
    assert probed.is_cpu and probed.device.flops["fp32"] > 1e8
    (tmp_path / "fourfold").mkdir()
    (tmp_path / "fourfold" / "cluster.json").write_text(json.dumps(machine(2).to_dict()))
    assert here(2) == machine(2)
    shared = here(4)
    assert shared.world == 4
    assert shared.device.flops["fp32"] == machine(2).device.flops["fp32"] / 2


def test_random_numbers_that_no_plan_makes_equal_are_noted():
    class Noisy(GPT):
        def forward(self, tokens):
            logits = super().forward(tokens)
            return logits + torch.rand_like(logits)

    subject = Subject(lambda: Noisy(CONFIG), cross_entropy, {"tokens": TOKENS["tokens"][:2]}, ROWS, tokens_per_row=16)
    (line,) = plan(subject, machine(), Plan()).notes
    assert line.startswith("not exact: the model calls rand_like, which draws from torch's own generator")
