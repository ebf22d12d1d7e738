"""The closed forms against the meter: a GPT trained on thread ranks sends exactly what they say, on every axis."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from fourfold.models import gpt
from fourfold.plan import Plan
from fourfold.planner.network import Network
from fourfold.planner.tolls import AXES, Factors, Job, Tolls
from fourfold.training.losses import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from fourfold.wire.threads import launch

ROWS, LENGTH, LAYERS, WIDTH, HEADS = 12, 16, 2, 96, 4
LARGE, SMALL = 384, 192
"""Vocabularies: beside the first the table of positions is small enough to lie whole on every rank."""

BATCH = {"tokens": torch.randint(SMALL, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(7))}
TALLIES = "control"
"""What ranks tell one another beside the step's own traffic."""


@pytest.fixture(scope="module")
def models():
    return {vocabulary: gpt.GPT(gpt.Config(vocabulary, LENGTH, LAYERS, WIDTH, HEADS)) for vocabulary in (LARGE, SMALL)}


def metered(model, grid, microbatches, recompute):
    """Bytes of every rank's step, by (axis, kind, op)."""
    placement = {**grid.settings(), "precision": "fp64", "recompute": recompute}
    plan = Plan.of({"placement": placement, "schedule": {"name": "accumulate", "microbatches": microbatches}})

    def body(world):
        own = copy.deepcopy(model)
        run = parallelize(own, cross_entropy, OptimizerOptions(name="sgd"), plan, world=world, example=BATCH)
        run.step(BATCH)
        return run.ledger.traffic(0)

    return [
        {tuple(flow)[:3]: traffic.bytes for flow, traffic in found.items() if flow.kind != TALLIES}
        for found in launch(grid.world, body)
    ]


CASES = [
    (Factors(1, 2, 2, 2), 1, "none", LARGE),
    (Factors(4, 1, 2, 1), 3, "none", SMALL),
    (Factors(2, 2, 2, 1), 2, "full", SMALL),
    (Factors(3, 2, 1, 1), 1, "none", LARGE),
    (Factors(1, 3, 2, 1), 1, "none", LARGE),  # four heads over three ranks
]


@pytest.mark.parametrize(("grid", "microbatches", "recompute", "vocabulary"), CASES, ids=str)
def test_the_meter_says_what_the_closed_forms_said(models, grid, microbatches, recompute, vocabulary):
    network = Network.gpt(WIDTH, LAYERS, HEADS, vocabulary=vocabulary, sequence=LENGTH)
    job = Job(ROWS, microbatches, itemsize=8, gradient=8, statistic=8, recompute=recompute, logits="cut")
    for rank, found in enumerate(metered(models[vocabulary], grid, microbatches, recompute)):
        at = Factors(*(rank // grid.stride(axis) % size for axis, size in zip(AXES, grid, strict=True)))
        expected: Counter[tuple[str, ...]] = Counter()
        for toll in Tolls(network, grid, job, at).listed:
            expected[toll.axis, toll.kind, toll.op] += toll.sent
        assert found == dict(expected), at
