"""Forecasts of plans that cut features: exact bytes, the published formula at scale, time, refusals."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from fourfold.hardware import Cluster, Device, Link
from fourfold.ledger import Ledger
from fourfold.models.gpt import GPT, Config
from fourfold.plan import Plan
from fourfold.planner import Forecast, ForecastError, Subject, Traces, forecast
from fourfold.planner.clock import Timing
from fourfold.planner.likeness import network
from fourfold.planner.tolls import AXES, Factors, Job, Tolls
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from fourfold.wire import threads
from plain import stock_work

ROWS, SEQUENCE, VOCABULARY = 7, 16, 97
CONFIG = Config(vocabulary=VOCABULARY, context=SEQUENCE, layers=4, width=36, heads=4)
"""Sizes that no grid here divides everywhere."""

TOKENS = {"tokens": torch.zeros(ROWS, SEQUENCE + 1, dtype=torch.int64)}


def machine(devices: int = 16, bandwidth: float = 1e9, latency: float = 1e-5, flops: float = 1e11) -> Cluster:
    link = Link("cable", latency, bandwidth)
    peaks = {"fp32": flops, "bf16": flops, "fp64": flops}
    return Cluster(1, devices, Device("cpu_made_up", 2**30, flops / 10, peaks, "cable"), link, link)


def plan(microbatches: int = 1, algorithm: str = "4d", **placement: Any) -> Plan:
    sizes = {axis: placement.pop(axis) for axis in ("x", "y", "z") if axis in placement}
    return Plan.of(
        {
            "placement": {"tensor": {"algorithm": algorithm, **sizes}, **placement},
            "schedule": {"name": "accumulate", "microbatches": microbatches},
        }
    )


@pytest.fixture(scope="module")
def traces() -> Traces:
    batch = {"tokens": TOKENS["tokens"][:2]}
    return Traces(Subject(lambda: GPT(CONFIG), cross_entropy, batch, ROWS, tokens_per_row=SEQUENCE))


def flows(ledger: Ledger) -> dict[tuple[str, ...], tuple[int, int]]:
    return {tuple(key): (one.calls, one.bytes) for key, one in ledger.traffic().items() if key.kind != "control"}


def run_once(world: Any, model: Any, loss: Any, batch: Any, chosen: Plan) -> tuple[Any, Any]:
    run = parallelize(copy.deepcopy(model), loss, OptimizerOptions(), chosen, world=world)
    run.step(batch)
    said = flows(run.forecast())
    run.ledger.steps = {0: run.ledger.steps[0]}
    return said, flows(run.ledger)


@pytest.mark.parametrize(
    "chosen",
    [
        plan(x=2, y=2),
        plan(x=3, z=2, recompute="full", microbatches=2),
        plan(y=3, data=2, precision="bf16", recompute="selective", microbatches=3),
        plan(y=2, algorithm="1d"),
        plan(y=3, algorithm="1d-sequence", recompute="full"),
        plan(x=2, y=2, chunks=3),
        plan(y=2, algorithm="1d-sequence", chunks=2),
    ],
    ids=str,
)
def test_bytes_are_those_that_a_run_forecasts_and_meters(traces, chosen):
    said, metered = threads.launch(chosen.world, run_once, GPT(CONFIG), cross_entropy, TOKENS, chosen)[0]
    ledger = forecast(traces, machine(), chosen).ledger
    found = flows(ledger)
    assert found == said == metered
    assert not [key for key in ledger.traffic() if key.kind == "control"], "a run's own formulas tell those"
    assert any(key[0] in ("x", "y") for key in found)


def test_chunks_hide_the_sums_that_forward_waits_for():
    """Links on which a sum takes about as long as its product: in two chunks, one of two is hidden."""
    config = dataclasses.replace(CONFIG, width=144, vocabulary=32)
    traces = Traces(Subject(lambda: GPT(config), cross_entropy, {"tokens": TOKENS["tokens"][:2]}, 8))

    def timing(chunks: int, latency: float = 1e-5) -> Timing:
        cable = machine(bandwidth=2.5e8, latency=latency, flops=2e10)
        return forecast(traces, cable, plan(y=2, chunks=chunks)).timing

    whole, halves = timing(1), timing(2)
    assert halves.exposed["y"] < 0.85 * whole.exposed["y"] and halves.total < whole.total
    assert timing(8, 1e-2).total > timing(1, 1e-2).total  # eight messages for one cost more than they hide


def test_bytes_of_the_3d_algorithm():
    chosen = Plan.of({"placement": {"tensor": {"algorithm": "3d", "q": 2}}})
    tokens = {"tokens": torch.zeros(12, SEQUENCE + 1, dtype=torch.int64)}
    said, metered = threads.launch(8, run_once, GPT(CONFIG), cross_entropy, tokens, chosen)[0]
    subject = Subject(lambda: GPT(CONFIG), cross_entropy, {"tokens": TOKENS["tokens"][:2]}, 12)
    assert flows(forecast(subject, machine(), chosen).ledger) == said == metered


def panels(algorithm: str, microbatches: int = 1, **placement: Any) -> Plan:
    sizes = {size: placement.pop(size) for size in ("q", "d") if size in placement}
    return Plan.of(
        {
            "placement": {"tensor": {"algorithm": algorithm, **sizes}, **placement},
            "schedule": {"name": "accumulate", "microbatches": microbatches},
        }
    )


@pytest.mark.parametrize(
    ("chosen", "tied"),
    [
        (panels("2d", q=2), True),
        (panels("2d", q=2, precision="bf16", shard="optimizer"), False),
        (panels("2.5d", q=2, d=2, microbatches=2, recompute="full"), True),
    ],
    ids=str,
)
def test_bytes_of_grids_of_panels(chosen, tied):
    config = dataclasses.replace(CONFIG, tied=tied)
    subject = Subject(lambda: GPT(config), cross_entropy, {"tokens": TOKENS["tokens"][:2]}, ROWS)
    found = forecast(subject, machine(), chosen)
    said, metered = threads.launch(chosen.world, run_once, GPT(config), cross_entropy, TOKENS, chosen)[0]
    assert flows(found.ledger) == said == metered
    assert {key[2] for key in flows(found.ledger)} >= {"broadcast", "reduce"}
    assert found.timing.exposed["y"] > 0 and found.timing.exposed["z"] > 0


def test_weights_of_a_grid_of_panels_lie_on_one_rank_each_and_do_not_travel():
    config = dataclasses.replace(CONFIG, tied=False)
    subject = Subject(lambda: GPT(config), cross_entropy, {"tokens": TOKENS["tokens"][:2]}, ROWS)
    found = forecast(subject, machine(), panels("2d", q=2)).ledger
    linears = 4 * (12 * 36 * 36) + 36 * (VOCABULARY + 1)  # the first rank has 49 of 97 columns of the head
    rest = 4 * (9 * 36 + 4 * 36) + 2 * 36 + (VOCABULARY + SEQUENCE) * 36  # biases, norms and tables
    assert found.memory["parameters"] == pytest.approx(4 * (linears + rest) / 4, rel=0.04)  # segments are padded
    assert found.sent(axis="z", kind="weight") > 4 * linears / 4 * 2  # panels, forward and backward; tables gathered


def test_copies_of_key_value_heads_are_summed():
    work = stock_work("llama", steps=1)
    model, batch = work.fresh(), work.batch(0)
    small = {name: tensor[:2] for name, tensor in batch.items()}
    chosen = plan(y=4, precision="fp64")
    said, metered = threads.launch(4, run_once, model, work.loss, batch, chosen)[0]
    found = flows(forecast(Subject(work.fresh, work.loss, small, work.rows), machine(), chosen).ledger)
    assert found == said == metered
    assert ("y/2", "gradient", "all_reduce") in found


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 16 * SEQUENCE + 1])  # positions are cut over y, or are not
def test_closed_form_and_trace_send_the_same(vocabulary):
    config = dataclasses.replace(CONFIG, vocabulary=vocabulary)
    traces = Traces(Subject(lambda: GPT(config), cross_entropy, {"tokens": TOKENS["tokens"][:2]}, ROWS))
    found = forecast(traces, machine(), plan(x=2, y=2, z=2)).ledger
    likeness = network(traces)
    assert likeness is not None
    assert {axis: found.sent(axis=axis) for axis in AXES} == Tolls(
        likeness, Factors(2, 2, 2), Job(ROWS, itemsize=4)
    ).sent()


def test_4096_devices_of_an_80b_model_by_trace_and_by_the_formula():
    h, rows, sequence, vocabulary, layers = 12288, 1024, 2048, 51200, 42
    x, y, z, data = 4, 8, 16, 8
    config = Config(vocabulary=vocabulary, context=sequence, layers=layers, width=h, heads=96)
    tokens = {"tokens": torch.zeros(2, sequence + 1, dtype=torch.int64)}
    subject = Subject(lambda: GPT(config), cross_entropy, tokens, rows, tokens_per_row=sequence)
    chosen = plan(x=x, y=y, z=z, data=data, recompute="full", precision="bf16")
    found = forecast(subject, Cluster.parse("1024 nodes of perlmutter"), chosen)
    assert found.fits and found.timing.total > 0
    e, m = 2, rows // data * sequence
    here = m // z
    block = 8 * e * m * h / (x * y * z) * (3 * (x - 1) + (y - 1))
    again = e * m * h / (x * y * z) * (14 * (x - 1) + 4 * (y - 1))  # forward's sums, in recomputation
    merged = (x - 1) * here * 2 * 4  # mean and squared deviations of a token, in float32, gathered
    summed = 2 * (x - 1) / x * here * 2 * 4  # and two sums of a token in backward
    embedding = e * 2 * (y - 1) / y * here * h / x
    head = e * (2 * (x - 1) / x * here * vocabulary / y + 2 * (y - 1) / y * here * h / x)
    loss = 2 * (y - 1) / y * here * 2 * 4  # two numbers a token, exchanged and gathered
    expected = layers * (block + again + 2 * (2 * merged + summed)) + merged + summed + embedding + head + loss
    assert found.ledger.sent(axis="x") + found.ledger.sent(axis="y") == expected


def test_slow_links_show_as_waits_for_their_axis(traces):
    chosen = plan(x=2, y=2)
    fast, slow = (forecast(traces, machine(bandwidth=rate), chosen) for rate in (1e12, 1e7))
    for axis in ("x", "y"):
        assert slow.timing.exposed[axis] > 2 * fast.timing.exposed[axis]
    assert slow.timing.compute == fast.timing.compute


def test_sums_of_input_gradients_hide_behind_weight_gradients(traces):
    # compute is slow and links are not: what may hide does
    cluster = machine(flops=1e8, latency=0.0)
    on, off = (forecast(traces, cluster, plan(y=2, overlap=overlap)).timing for overlap in (True, False))
    assert sum(off.hidden.values()) == pytest.approx(0, abs=1e-12)
    assert on.hidden["y"] + on.exposed["y"] == pytest.approx(off.exposed["y"])
    # forward's sums, the embedding's and the loss's are waited for; backward's sums lie behind products
    ledger = forecast(traces, cluster, plan(y=2)).ledger
    backward = ledger.sent(axis="y", kind="activation-gradient")
    assert on.hidden["y"] / off.exposed["y"] == pytest.approx(backward / ledger.sent(axis="y"), rel=1e-6)


def test_compute_and_states_are_cut(traces):
    whole, cut = (forecast(traces, machine(), chosen) for chosen in (Plan(), plan(x=2, y=2)))
    products = 12 * 36 * 36 * 4 / 4 + 49 * 18  # weights of the linears, and of the head: half of 97 rows is 49
    attention = 4 * (4 * SEQUENCE * SEQUENCE * 36) * 3.5 / 2  # heads lie over y alone
    assert cut.ledger.notes["flops"] == ROWS * (6 * SEQUENCE * products + attention)
    for category in ("parameters", "optimizer"):
        assert cut.ledger.memory[category] == pytest.approx(whole.ledger.memory[category] / 4, rel=0.1)
    assert cut.peak < whole.peak


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (plan(y=8), r"blocks.0.attention.qkv.weight: 3 heads over y = 8 leave some rank without any"),
        (plan(x=40, y=1), r"over x = 40 leave some rank without any; expected .*x of at most 36"),
    ],
    ids=str,
)
def test_grids_that_cannot_be_name_the_layer_the_axis_and_what_fits(chosen, said):
    config = dataclasses.replace(CONFIG, heads=3) if chosen.placement.grid.y == 8 else CONFIG
    batch = {"tokens": TOKENS["tokens"][:2]}
    subject = Subject(lambda: GPT(config), cross_entropy, batch, ROWS)
    with pytest.raises(ForecastError, match=said) as refused:
        forecast(subject, machine(64), chosen)
    assert f"nearest grids of {chosen.world} that fit: x " in str(refused.value)


def test_a_square_that_cannot_be_names_squares_that_can():
    subject = Subject(
        lambda: GPT(dataclasses.replace(CONFIG, heads=2)), cross_entropy, {"tokens": TOKENS["tokens"][:2]}, 9
    )
    with pytest.raises(ForecastError) as refused:
        forecast(subject, machine(64), panels("2d", q=3))
    assert "; 2d fits with q 2; 4d: nearest grids of 9 that fit: x " in str(refused.value)


def test_rows_and_devices_that_do_not_suffice(traces):
    found: Forecast = forecast(traces, machine(64), plan(x=2, z=4, data=2))
    assert found.bound == "rows: z x data = 8, and the batch has 7: some ranks would compute nothing"
    with pytest.raises(ForecastError, match="needs 16 devices, and the machine has 8"):
        forecast(traces, machine(8), plan(x=2, y=2, z=4))
