"""A plan's schedule laid over its pipeline: the program that all ranks run, and who runs which stage."""

from __future__ import annotations

from fourfold.plan import Plan
from fourfold.schedule.action import FORWARD, ScheduleError
from fourfold.schedule.bind import bind
from fourfold.schedule.figures import passes
from fourfold.schedule.order import Shape, chunks_of
from fourfold.schedule.program import Program
from fourfold.schedule.validate import validate
from fourfold.schedule.work import Piece


def shape_of(plan: Plan) -> Shape:
    """Over what the schedule is laid."""
    workers, options = plan.placement.pipe, plan.schedule.options
    return Shape(workers * chunks_of(options), options.microbatches, workers, chunks_of(options))


def program_of(plan: Plan) -> Program:
    """One optimizer step.

    Raises:
        ScheduleError: the schedule cannot be laid over so many workers and micro-batches.
    """
    shape = shape_of(plan)
    if shape.microbatches < shape.workers:
        raise ScheduleError(
            f"plan.schedule.microbatches: {shape.workers} workers want at least as many micro-batches, or some always "
            f"idle; found {shape.microbatches}; try {shape.workers}, or plan.placement.pipe: {shape.microbatches}"
        )
    return validate(bind(plan.schedule.module.order(shape, plan.schedule.options), shape.workers), shape)


def homes(program: Program) -> tuple[tuple[int, ...], ...]:
    """The workers that run each stage."""
    found: dict[int, dict[int, None]] = {}
    for action in program.actions:
        if action.kind == FORWARD:
            found.setdefault(action.stage, {})[action.worker] = None
    return tuple(tuple(found[stage]) for stage in sorted(found))


def kept(plan: Plan, program: Program, worker: int) -> frozenset[Piece]:
    """The passes of a worker after which gathered weights stay for the next one, where the schedule wants that."""
    if not getattr(plan.schedule.module, "KEEPS", False):
        return frozenset()
    actions = [program.actions[number] for number in passes(program, worker)]
    pairs = zip(actions, actions[1:], strict=False)
    alike = (one for one, other in pairs if (one.kind, one.stage) == (other.kind, other.stage))
    return frozenset((one.kind, one.stage, one.microbatches.start) for one in alike)
