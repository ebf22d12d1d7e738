"""Square grids of a world size, and what their linears send: the published integers, and the traced forecast's."""

from __future__ import annotations

import pytest
import torch

from fourfold.hardware import Cluster, Device, Link
from fourfold.models.gpt import GPT, Config
from fourfold.placement.tensor import traffic
from fourfold.placement.tensor.traffic import Line
from fourfold.plan import Plan
from fourfold.planner import Subject, Traces, forecast
from fourfold.planner.likeness import network
from fourfold.planner.network import Linear, Network
from fourfold.planner.squares import Square, sent, squares
from fourfold.planner.tolls import Job
from fourfold.training.losses.cross_entropy import cross_entropy

ELEMENTS = Job(rows=32, itemsize=1, gradient=1)
"""One byte an element, so that bytes are elements."""


def test_square_grids_of_a_world():
    assert list(map(str, squares(4))) == ["2d q 2"]
    assert list(map(str, squares(8))) == ["2.5d q 2 d 2", "3d q 2"]
    assert list(map(str, squares(27))) == ["2.5d q 3 d 3", "3d q 3"]
    assert list(map(str, squares(64))) == ["2.5d q 2 d 16", "3d q 2 data 8", "2.5d q 4 d 4", "3d q 4", "2d q 8"]
    assert not list(squares(6))
    for square in squares(64):
        assert Plan.of({"placement": square.placement()}).world == 64


@pytest.mark.parametrize(
    ("square", "elements"),
    [
        (Square("2d", {"q": 2}), 320 + 640),
        (Square("2.5d", {"q": 2, "d": 2}), 256 + 512 + 192),
        # activations are gathered and scattered as published; weights are gathered again in backward
        (Square("3d", {"q": 2}), 352 + 352 + 1 / 8 * 16 * 48),
    ],
    ids=str,
)
def test_the_integer_vectors(square, elements):
    """M = 32, K = 16, N = 48, elements sent a rank (tensor-parallel.md 2.2)."""
    assert sent(Network("one", (Linear.of(16, 48),), 1, 16), square, ELEMENTS) == elements


@pytest.mark.parametrize("algorithm", ["2.5d", "2-5d", "2_5d"])
def test_a_plan_spells_its_algorithm_as_people_do(algorithm):
    plan = Plan.of({"placement": {"tensor": {"algorithm": algorithm, "q": 2, "d": 2}}})
    assert str(plan) == "2.5d q 2 d 2, z 2 shard parameters"
    assert plan.to_dict()["placement"]["tensor"]["algorithm"] == "2.5d" and Plan.of(plan.to_dict()) == plan


@pytest.mark.parametrize("square", [Square("2d", {"q": 2}), Square("3d", {"q": 2})], ids=str)
def test_most_of_what_a_traced_plan_sends(square):
    config = Config(vocabulary=96, context=16, layers=2, width=64, heads=4, tied=False)
    batch = {"tokens": torch.zeros(2, 17, dtype=torch.int64)}
    traces = Traces(Subject(lambda: GPT(config), cross_entropy, batch, 16, tokens_per_row=16))
    likeness, link = network(traces), Link("cable", 1e-5, 1e9)
    assert likeness is not None
    cluster = Cluster(1, 8, Device("cpu_made_up", 2**30, 1e10, {"fp32": 1e11}, "cable"), link, link)
    found = forecast(traces, cluster, Plan.of({"placement": square.placement()})).ledger
    said = sent(likeness, square, Job(16, itemsize=4, gradient=4))
    assert 0.75 * found.sent() < said < found.sent()
    if square.algorithm == "2d":  # nothing else is broadcast but for the head
        head = traffic.summa(8 * 16, 64, 96 // 2, rows=Line("z", 2), features=Line("y", 2), itemsize=4)
        panels = sum(one.bytes for flow, one in found.traffic().items() if flow.op in ("broadcast", "reduce"))
        assert said + sum(head.sent) == panels
