"""What the recipes of schedules share: gradients of ranks as threads, and a schedule in virtual time."""

from __future__ import annotations

from typing import Any

import torch

from fourfold.plan import Plan, Technique
from fourfold.recipes import _workload
from fourfold.schedule import Shape, Timeline, bind, simulate, validate
from fourfold.schedule.costs import Costs
from fourfold.schedule.order import chunks_of
from fourfold.training.losses import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from fourfold.verify.measure import worst
from fourfold.verify.serial import Serial, Types
from fourfold.wire import World
from fourfold.wire.threads import launch

OPTIONS = OptimizerOptions(name="sgd", lr=0.1)
EPSILON = 1e-12
EXACT = "gradients differ from serial"


def laid(name: str, workers: int, microbatches: int, costs: Costs, **options: Any) -> Timeline:
    """A schedule in virtual time, on stages of `costs`."""
    technique = Technique.find("schedule", name, {"microbatches": microbatches, **options})
    chunks = chunks_of(technique.options)
    shape = Shape(workers * chunks, microbatches, workers, chunks)
    order = technique.module.order(shape, technique.options)
    return simulate(validate(bind(order, workers), shape), costs)


def difference(name: str, workers: int, microbatches: int, *, last: bool = True, **options: Any) -> float:
    """The worst relative difference of a step's gradients from one process's, on workers as threads.

    Args:
        last: with the last micro-batch; without, its rows are those of another batch.
    """
    types = Types(torch.float64, torch.float64, torch.float64)
    reference = Serial(_workload.model(torch.float64), cross_entropy, OPTIONS, seed=1, types=types)
    batch = _workload.batch()
    expected = reference.step(0, batch).gradients
    if not last:
        batch = {key: torch.cat([value[:-1], value[:1]]) for key, value in batch.items()}
    plan = Plan.of(
        {
            "placement": {"pipe": workers, "precision": "fp64"},
            "schedule": {"name": name, "microbatches": microbatches, **options},
        }
    )
    return max(worst(found, expected).error for found in launch(workers, _step, plan, batch))


def _step(world: World, plan: Plan, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = _workload.model(torch.float64)
    run = parallelize(model, cross_entropy, OPTIONS, plan, world=world, example=_workload.batch())
    run.step(batch)
    found = run.logical_gradients()
    run.close()
    return found
