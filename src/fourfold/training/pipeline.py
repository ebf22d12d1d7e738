"""Which part of the model is whose in a pipeline, and the program that evaluates it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fourfold.anatomy import Anatomy
from fourfold.anatomy.layers import layers
from fourfold.placement.pipe.cuts import balanced, estimated, possible, said
from fourfold.placement.pipe.part import Part
from fourfold.placement.refusals import PlacementError
from fourfold.plan import Plan
from fourfold.schedule import Program, Shape, bind
from fourfold.schedule.action import BACKWARD_WEIGHT
from fourfold.schedule.laid import homes
from fourfold.schedule.work import Work
from fourfold.training.loss_value import Loss


def evaluation(program: Program, microbatches: int) -> Program:
    """Forwards alone, each stage on the first worker that holds it."""
    workers = [first for first, *_ in homes(program)]
    work = Work(Shape(len(workers), microbatches, program.workers))
    line = (
        work.forward(stage, microbatch, worker)
        for microbatch in range(microbatches)
        for stage, worker in enumerate(workers)
    )
    return bind(line, program.workers)


def part_of(
    model: nn.Module,
    loss: Loss,
    example: Mapping[str, Tensor],
    anatomy: Anatomy,
    plan: Plan,
    program: Program,
    worker: int,
) -> Part | None:
    """A worker's part of the model; None where there is but one.

    Raises:
        PlacementError: the model is no line of layers, or has fewer than there are stages.
    """
    if plan.placement.pipe == 1:
        return None
    line = layers(model, loss, example, anatomy.blocks)
    if line.looks:
        raise PlacementError(
            f"plan.placement.pipe: the model's code between its layers cannot run again on another stage: "
            f"{'; '.join(line.looks)}; move that into a layer (a module with weights), or use pipe: 1"
        )
    given = plan.placement.cut
    stages = homes(program)
    if given is None:
        bounds = balanced(estimated(model, line), len(stages), allowed=possible(line))
    else:
        bounds = said(given, len(stages), line)
    splits = any(action.kind == BACKWARD_WEIGHT for action in program.actions)
    return Part.of(model, line, bounds, stages, worker, splits=splits)
