"""Data parallelism: every replica holds the model, computes on its rows, and gradients are summed."""

from __future__ import annotations

import torch

from fourfold.placement.seats import room
from fourfold.plan import Plan
from fourfold.recipes import _workload
from fourfold.recipes._claim import Claim
from fourfold.training.losses import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import Run, parallelize
from fourfold.verify.measure import worst
from fourfold.verify.serial import Serial, Types
from fourfold.wire import World
from fourfold.wire.threads import launch

REPLICAS = (2, 3, 4)
OPTIONS = OptimizerOptions(name="sgd", lr=0.1)
EPSILON = 1e-12


def claim() -> Claim:
    """Li et al. 2020, sections 2.3 and 3.2; the bytes are those of a bandwidth-optimal all-reduce.

    Behind the gradients ride the few numbers that replicas tell each other in a step.
    """
    predicted: dict[str, float] = {}
    for replicas in REPLICAS:
        predicted[f"bytes sent, {replicas} replicas"] = (
            2 * (replicas - 1) / replicas * 8 * (_workload.parameters() + room(replicas))
        )
        predicted[f"gradients differ from serial, {replicas} replicas"] = 0.0
    return Claim(
        system="PyTorch DistributedDataParallel",
        paper="Li et al. 2020, arXiv 2006.15704; Patarasuk and Yuan 2009",
        statement="gradients equal one process's (within 1e-12 in fp64); a rank sends 2(d-1)/d of them",
        predicted=predicted,
        measure=lambda: _figures(summed=True),
        control=lambda: _figures(summed=False),
        off="every replica keeps the gradient of its own rows",
        tolerance=EPSILON,
    )


def _figures(*, summed: bool) -> dict[str, float]:
    reference = Serial(
        _workload.model(torch.float64),
        cross_entropy,
        OPTIONS,
        seed=1,
        types=Types(torch.float64, torch.float64, torch.float64),
    )
    expected = reference.step(0, _workload.batch()).gradients
    figures: dict[str, float] = {}
    for replicas in REPLICAS:
        run = launch(replicas, _step, summed)[0]
        gradients, sent = run
        figures[f"bytes sent, {replicas} replicas"] = sent
        figures[f"gradients differ from serial, {replicas} replicas"] = worst(gradients, expected).error
    return figures


def _step(world: World, summed: bool) -> tuple[dict[str, torch.Tensor], int]:
    batch = _workload.batch()
    if summed:
        run = _run(Plan.of({"placement": {"data": world.size, "precision": "fp64"}}), world)
    else:
        alone = World(0, 1, "alone", world.device)
        run = _run(Plan.of({"placement": {"precision": "fp64"}}), alone)
        rows = _workload.ROWS // world.size
        batch = {name: tensor[world.rank * rows : (world.rank + 1) * rows] for name, tensor in batch.items()}
    run.step(batch)
    return run.logical_gradients(), run.ledger.sent(0, kind="gradient")


def _run(plan: Plan, world: World) -> Run:
    model = _workload.model(torch.float64)
    return parallelize(model, cross_entropy, OPTIONS, plan, world=world, example=_workload.batch())
