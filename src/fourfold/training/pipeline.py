"""A plan's schedule laid over its pipeline: the program that all ranks run, and which part of the model is whose."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fourfold.anatomy import Anatomy
from fourfold.anatomy.layers import Layers, layers
from fourfold.placement.pipe.cuts import balanced, estimated, possible
from fourfold.placement.pipe.part import Part
from fourfold.placement.refusals import PlacementError
from fourfold.plan import Plan
from fourfold.schedule import Program, ScheduleError, Shape, bind, validate
from fourfold.schedule.action import BACKWARD_WEIGHT, EVICT, FORWARD, LOAD, OFFLOAD, RECOMPUTE, RELOAD
from fourfold.schedule.budget import Budget
from fourfold.schedule.figures import held, passes
from fourfold.schedule.order import chunks_of
from fourfold.schedule.ready import Mode
from fourfold.schedule.work import Piece, Work
from fourfold.training.loss_value import Loss

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
    return frozenset((one.kind, one.stage, one.microbatches.start) for one in alike)


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
        bounds = _said(given, len(stages), line)
    splits = any(action.kind == BACKWARD_WEIGHT for action in program.actions)
    return Part.of(model, line, bounds, stages, worker, splits=splits)


def _said(cut: tuple[int, ...], stages: int, line: Layers) -> tuple[int, ...]:
    """Bounds of stages with these numbers of layers."""
    paths = [layer.path for layer in line.calls]
    if len(cut) != stages or sum(cut) != len(paths) or min(cut) < 1:
        raise PlacementError(
            f"plan.placement.cut: expected {stages} numbers of at least 1 that add up to the model's {len(paths)} "
            f"layers ({', '.join(paths)}), found {list(cut)}, which add up to {sum(cut)}; no layer may be left out"
        )
    bounds = (0, *(sum(cut[: number + 1]) for number in range(stages)))
    fit = possible(line)
    for bound in bounds:
        if not fit[bound]:
            places = [at for at in range(1, len(paths)) if fit[at]]
            raise PlacementError(
                f"plan.placement.cut: layer {paths[bound]} or one behind it reads what an earlier layer made or "
                "changed inside (state that they share), which is none of its results and cannot cross; expected "
                f"cuts before layers {places}, found {bound}"
            )
    return bounds
