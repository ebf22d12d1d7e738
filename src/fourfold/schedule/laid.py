"""A plan's schedule laid over its pipeline: the program that all ranks run, and who runs which stage."""

from __future__ import annotations

from fourfold.plan import Plan
from fourfold.schedule.action import BACKWARD_WEIGHT, EVICT, FORWARD, LOAD, OFFLOAD, RECOMPUTE, RELOAD, ScheduleError
from fourfold.schedule.bind import bind
from fourfold.schedule.budget import Budget
from fourfold.schedule.figures import held, passes
from fourfold.schedule.order import Shape, chunks_of
from fourfold.schedule.program import Program
from fourfold.schedule.ready import Mode
from fourfold.schedule.validate import validate
from fourfold.schedule.work import Piece, piece_of

TIERED = (RECOMPUTE, OFFLOAD, RELOAD, EVICT, LOAD)
"""Kinds that are laid out and simulated, but have no body."""


def shape_of(plan: Plan) -> Shape:
    """Over what the schedule is laid."""
    workers, options = plan.placement.pipe, plan.schedule.options
    return Shape(workers * chunks_of(options), options.microbatches, workers, chunks_of(options))


def program_of(plan: Plan) -> Program:
    """One optimizer step.

    Raises:
        ScheduleError: the schedule cannot be laid over so many workers and micro-batches, wants what has no body here,
            or never empties its pipeline: a step ends with an empty one.
    """
    shape, module = shape_of(plan), plan.schedule.module
    if hasattr(module, "stream"):
        raise ScheduleError(
            f"schedule {plan.schedule.spelling} never empties its pipeline: expected one whose step begins and ends "
            "with an empty pipeline, since training drives no other; try 1f1b"
        )
    if shape.microbatches < shape.workers:
        raise ScheduleError(
            f"plan.schedule.microbatches: {shape.workers} workers want at least as many micro-batches, or some always "
            f"idle; found {shape.microbatches}; try {shape.workers}, or plan.placement.pipe: {shape.microbatches}"
        )
    program = validate(bind(module.order(shape, plan.schedule.options), shape.workers), shape)
    unknown = {action.kind: None for action in program.actions if action.kind in TIERED}
    if unknown:
        raise ScheduleError(
            f"schedule {plan.schedule.spelling} wants actions that training cannot run yet, only simulate: "
            f"{', '.join(unknown)}; try 1f1b or interleaved, with placement.recompute to keep less"
        )
    return program


def homes(program: Program) -> tuple[tuple[int, ...], ...]:
    """The workers that run each stage."""
    found: dict[int, dict[int, None]] = {}
    for action in program.actions:
        if action.kind == FORWARD:
            found.setdefault(action.stage, {})[action.worker] = None
    return tuple(tuple(found[stage]) for stage in sorted(found))


def mode_of(plan: Plan, program: Program) -> Mode | None:
    """How workers choose among what is ready; None: they keep to the order."""
    module, options = plan.schedule.module, plan.schedule.options
    if hasattr(module, "mode"):
        return module.mode(shape_of(plan), options)
    if not getattr(options, "ready", False):
        return None
    own = held(program)
    return Mode(Budget(own if options.in_flight is None else [max(options.in_flight, most) for most in own]))


def kept(plan: Plan, program: Program, worker: int) -> frozenset[Piece]:
    """The passes of a worker after which gathered weights stay for the next one, where the schedule wants that."""
    if not getattr(plan.schedule.module, "KEEPS", False) or mode_of(plan, program) is not None:
        return frozenset()
    actions = [program.actions[number] for number in passes(program, worker)]
    pairs = zip(actions, actions[1:], strict=False)
    alike = (one for one, other in pairs if (one.kind, one.stage) == (other.kind, other.stage))
    return frozenset(map(piece_of, alike))


def uses(program: Program, worker: int, keeps: frozenset[Piece]) -> list[tuple[bool, int, bool]]:
    """A worker's passes that want weights, in their order: (forward, stage, gathered weights stay after it)."""
    actions = (program.actions[number] for number in passes(program, worker))
    wanting = (one for one in actions if one.kind != BACKWARD_WEIGHT)
    return [(one.kind == FORWARD, one.stage, piece_of(one) in keeps) for one in wanting]
