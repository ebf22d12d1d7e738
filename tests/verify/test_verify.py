"""A right plan passes, a wrong one fails: with thread ranks, in double precision."""

import copy
import dataclasses
import warnings

import pytest
import torch

from fourfold.models import gpt
from fourfold.plan import Plan
from fourfold.training import step as training_step
from fourfold.training.batch import Held
from fourfold.training.losses import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.verify.case import Case, Evidence, examine
from fourfold.verify.verdict import Verdict
from fourfold.wire.threads import launch

SHAPE = gpt.Config(vocabulary=31, context=8, layers=2, width=16, heads=2, dropout=0.1)
OPTIONS = OptimizerOptions(name="sgd", lr=0.5, clip=1.0)


def case(placement, microbatches=1, steps=2, options=OPTIONS, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        template = gpt.GPT(SHAPE)
    if placement.get("precision", "fp64") == "fp64":
        placement = {**placement, "precision": "fp64"}
        template = template.double()

    def batch(number):
        generator = torch.Generator().manual_seed(number)
        return Held({"tokens": torch.randint(31, (6, 9), generator=generator)})

    return Case(
        model=lambda: (copy.deepcopy(template), None),
        plain=lambda: copy.deepcopy(template),
        loss=cross_entropy,
        options=options,
        plan=Plan.of({"placement": placement, "schedule": {"microbatches": microbatches}, **settings}),
        batch=batch,
        seed=3,
        steps=steps,
    )


def on(base, make):
    """The case with another model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        template = make()
    return dataclasses.replace(
        base, model=lambda: (copy.deepcopy(template), None), plain=lambda: copy.deepcopy(template)
    )


def verdict(case):
    evidence = launch(case.plan.world, examine, case)
    assert [Evidence.from_dict(one.to_dict()) for one in evidence] == evidence
    return Verdict.of(case.plan, evidence, "threads")


@pytest.mark.parametrize(
    ("placement", "microbatches"),
    [
        ({}, 1),
        ({}, 2),
        ({"data": 3}, 1),
        ({"z": 2, "shard": "optimizer"}, 2),
        ({"z": 2, "shard": "parameters", "recompute": "full"}, 2),
        ({"z": 2, "data": 2, "shard": "gradients"}, 1),
    ],
)
def test_exact_plans_equal_serial(placement, microbatches):
    found = verdict(case(placement, microbatches))
    assert found.ok and found.exact, found.text()
    assert found.worst.error <= 1e-12 and found.rounding <= 1e-12
    assert len(found.steps) == 2 and found.to_dict()["verdict"].startswith("equal to serial")


def test_one_rank_is_not_called_ranks():
    assert "1 step on 1 rank (threads)" in verdict(case({}, steps=1)).text()


class Noisy(gpt.GPT):
    """Numbers of torch's own after the blocks."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits * (1 + 0.1 * torch.rand_like(logits))


def test_random_numbers_that_are_torchs_own_are_said():
    plain = case({"data": 2}, steps=1)
    noisy = on(plain, lambda: Noisy(SHAPE).double())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "not exact: the model calls rand_like")
        found = verdict(noisy)
    line = "the model calls rand_like, which draws from torch's own generator"
    assert not found.ok and line in found.text() and "see what is not exact above" in found.text()
    plainly = found.to_dict()
    assert plainly["exact"] is False and plainly["inexact"][0].startswith(line)


def test_adam_with_infinity_norm():
    options = OptimizerOptions(lr=1e-2, clip=0.01, clip_norm=float("inf"), warmup=2, decay="cosine", steps=3)
    assert verdict(case({"z": 3, "shard": "parameters"}, steps=3, options=options)).ok


def test_an_inexact_plan_is_within_its_bound():
    found = verdict(case({"data": 2}, wire={"gradient": {"name": "bf16"}}))
    assert not found.exact and found.ok, found.text()
    assert 1e-6 < found.worst.error <= found.allowed < 0.05
    assert "within its bound" in found.text() and "bf16" in found.text()


def test_a_scaled_gradient_fails(monkeypatch):
    original = training_step.norm.coefficient
    monkeypatch.setattr(training_step.norm, "coefficient", lambda norm, limit: original(norm, limit) * (1 + 1e-9))
    found = verdict(case({"data": 2}))
    assert not found.ok and found.bytes_equal and found.agree
    assert "NOT EQUAL TO SERIAL: an exact plan differs" in found.text()


def test_an_inexact_plan_beyond_its_bound_fails(monkeypatch):
    original = training_step.norm.coefficient
    monkeypatch.setattr(training_step.norm, "coefficient", lambda norm, limit: original(norm, limit) * 1.5)
    found = verdict(case({"data": 2}, wire={"gradient": {"name": "bf16"}}))
    assert not found.ok and "NOT EQUAL TO SERIAL: beyond its bound" in found.text()


def test_replicas_that_drift_apart_fail(monkeypatch):
    original = training_step.Step._update

    def update(self, action):
        original(self, action)
        if self.mesh["data"].index == 1:
            self.placed.units[0].arena.shard[0] += 1e-16 * 2**20

    monkeypatch.setattr(training_step.Step, "_update", update)
    found = verdict(case({"data": 2}, steps=1))
    assert not found.agree and not found.ok and "replicas have drifted apart" in found.text()


def test_bytes_that_were_not_predicted_fail(monkeypatch):
    original = training_step.Step._update

    def update(self, action):
        self.mesh["data"].collect([1.0])
        original(self, action)

    monkeypatch.setattr(training_step.Step, "_update", update)
    found = verdict(case({"data": 2}, steps=1))
    assert found.near and not found.bytes_equal and not found.ok
    assert "DIFFERS" in found.text() and "bytes moved are not the bytes predicted" in found.text()


def test_a_model_that_rounds_to_float32_inside_is_held_to_its_own_rounding():
    class Rounding(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, tokens):
            return self.inner(tokens).float().double()

    base = case({"data": 2})
    rounding = on(base, lambda: Rounding(gpt.GPT(SHAPE).double()))
    found = verdict(rounding)
    assert found.ok, found.text()


def test_a_model_that_mixes_rows_is_not_decided_or_not_equal():
    class Mixing(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, tokens):
            logits = self.inner(tokens)
            return logits * (1 + logits.mean())

    base = case({"data": 2})
    mixing = on(base, lambda: Mixing(gpt.GPT(SHAPE).double()))
    found = verdict(mixing)
    assert not found.ok and "not decided: plain PyTorch itself differs" in found.text()


class Normed(torch.nn.Module):
    """Logits with the statistics of a micro-batch in them."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(31, 16), torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 31)

    def forward(self, tokens):
        return self.head(self.norm(self.table(tokens).transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_batch_norm_is_held_against_the_same_micro_batches(microbatches):
    base = case({"z": 3, "shard": "parameters"}, microbatches)
    normed = on(base, lambda: Normed().double())
    found = verdict(normed)
    assert found.ok and found.exact, found.text()
    assert found.worst.error <= 1e-12 and found.rounding <= 1e-12


@pytest.mark.parametrize("placement", [{"data": 2}, {"z": 2, "shard": "parameters"}])
def test_bf16_is_within_its_bound_and_not_by_chance(placement):
    found = verdict(case({**placement, "precision": "bf16"}))
    assert not found.exact and found.ok, found.text()
    assert found.worst.error > found.allowed / 1000


class Averaging(torch.nn.Module):
    """Keeps a moving average of its features, which nothing tells other ranks of; a rate of 0 keeps it still."""

    average: torch.Tensor

    def __init__(self, rate=0.1):
        super().__init__()
        self.table, self.head, self.rate = torch.nn.Embedding(31, 16), torch.nn.Linear(16, 31), rate
        self.register_buffer("average", torch.ones(16))

    def forward(self, tokens):
        x = self.table(tokens)
        with torch.no_grad():
            self.average.lerp_(x.mean((0, 1)), self.rate)
        return self.head(x)


def averaging(placement, rate=0.1, **settings):
    base = case(placement, **settings)
    return on(base, lambda: Averaging(rate).double())


@pytest.mark.parametrize("placement", [{"data": 2}, {"z": 2, "shard": "parameters"}])
def test_a_buffer_that_each_rank_keeps_of_its_own_rows_fails_by_name(placement):
    found = verdict(averaging(placement))
    assert found.agree and found.bytes_equal and not found.near and not found.ok
    assert found.drifted == ("average",) and found.worst.layer == "buffer average"
    assert "NOT EQUAL: ranks hold different values of the buffer average" in found.text()
    assert found.to_dict()["verdict"].startswith("NOT EQUAL TO SERIAL: an exact plan differs: ")
    assert "in buffer average, allowed" in found.to_dict()["verdict"]


def test_a_plan_with_a_bound_does_not_excuse_buffers_that_drift():
    found = verdict(averaging({"data": 2}, wire={"gradient": {"name": "bf16"}}))
    assert found.near and found.drifted == ("average",) and not found.ok


def test_a_buffer_passes_on_one_rank_and_where_it_stays_as_it_was():
    alone = verdict(averaging({}))
    assert alone.ok and alone.steps[-1].buffer.layer == "buffer average", alone.text()
    still = verdict(averaging({"data": 2}, rate=0.0))
    assert still.ok and still.steps[-1].buffer.layer == "" and "worst buffer" not in still.text()


def test_running_statistics_of_batch_norm_are_held_against_serial(monkeypatch):
    base = case({"z": 2, "shard": "parameters"})
    normed = on(base, lambda: Normed().double())
    found = verdict(normed)
    assert found.ok and found.steps[-1].buffer.layer.startswith("buffer norm.running_"), found.text()
    original = training_step.Step._update

    def update(self, action):
        original(self, action)
        self.placed.model.norm.running_var.mul_(1 + 1e-9)

    monkeypatch.setattr(training_step.Step, "_update", update)
    wrong = verdict(normed)
    assert not wrong.drifted and not wrong.near and wrong.worst.layer == "buffer norm.running_var"
