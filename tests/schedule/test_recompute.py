"""Recompute under any order: what is kept, when it runs, and what it costs."""

from importlib import import_module
from pkgutil import iter_modules

import pytest

from fourfold.schedule import Program, Shape, Timeline, bind, orders, simulate, validate
from fourfold.schedule.action import ACTIVATION_GRADIENT, CHECKPOINT, RECOMPUTE, STASH, Buffer
from fourfold.schedule.costs import Costs
from fourfold.schedule.figures import held
from fourfold.schedule.order import chunks_of
from fourfold.schedule.recompute import recomputed

ORDERS = sorted(
    name
    for _, name, _ in iter_modules(orders.__path__)
    if name not in ("accumulate", "chronospipe")  # one worker; recomputes by itself
)
P, M = 4, 8


def lay(name: str, early: bool | None, p: int = P, m: int = M) -> Program:
    """Of all stages; `early` None: without recompute."""
    module = import_module(f"fourfold.schedule.orders.{name}")
    options = module.Options(m)
    v = chunks_of(options)
    shape = Shape(p * v, m, p, v)
    actions = module.order(shape, options)
    if early is not None:
        actions = recomputed(actions, range(shape.stages), early=early)
    return validate(bind(actions, p), shape)


def most(timeline: Timeline, kind: str) -> list[int]:
    return list(timeline.peaks(lambda buffer: int(buffer.kind == kind)).values())


@pytest.mark.parametrize("name", ORDERS)
def test_any_order_recomputes(name):
    plain, late, early = (lay(name, when) for when in (None, False, True))
    without, part, ahead = (simulate(program, Costs()) for program in (plain, late, early))
    stages = max(action.stage for action in plain.actions) + 1
    for program in (late, early):
        again = [action for action in program.actions if action.kind == RECOMPUTE]
        assert sorted((one.stage, one.microbatches.start) for one in again) == [
            (stage, microbatch) for stage in range(stages) for microbatch in range(M)
        ]
        assert held(program) == held(plain)  # nothing else has another place
        assert all(any(buffer.kind.startswith("weight") for buffer in action.reads) for action in again)
    extra = stages * M / P
    for worker in range(P):
        assert part.busy(worker) == ahead.busy(worker) == without.busy(worker) + extra
    assert without.makespan < ahead.makespan <= part.makespan
    for timeline in (part, ahead):
        assert set(most(timeline, STASH)) == {1}  # the one that goes back next
        assert max(most(timeline, CHECKPOINT)) <= max(most(without, STASH))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_makespans_in_closed_form(name):
    # A part of the backward: its time is added to the backward's. Early: the last worker never waits, nor does what
    # the others recompute once they are under way, so that the drain is as short as without.
    for p, m in ((2, 4), (4, 8), (4, 16), (8, 16)):
        t = Costs(forward=1, backward_input=1, backward_weight=1)
        v = 2 if name == "interleaved" else 1
        late = simulate(lay(name, False, p, m), t).makespan
        assert late == m * v * 4 + (p - 1) * 4
        assert simulate(lay(name, True, p, m), t).makespan == late - (p - 1)


def test_memory_by_hand():
    program = lay("1f1b", False, 2, 1)
    timeline = simulate(program, Costs())
    # 0 | F  .  .  .  .  R  B  B
    # 1 | .  F  R  B  B
    memory = timeline.memory(lambda buffer: {CHECKPOINT: 1, STASH: 10}.get(buffer.kind, 0))
    assert memory[0] == [(0, 1), (5, 11), (6, 10), (8, 0)]
    assert memory[1] == [(1, 1), (2, 11), (3, 10), (5, 0)]
    early = simulate(lay("1f1b", True, 2, 1), Costs())
    assert early.memory(lambda buffer: int(buffer.kind == STASH))[0] == [(1, 1), (7, 0)]


def test_stages_that_are_not_named_keep_all():
    module = import_module("fourfold.schedule.orders.1f1b")
    shape = Shape(3, 4, 3)
    program = validate(bind(recomputed(module.order(shape, module.Options(4)), (0, 2)), 3), shape)
    assert {action.stage for action in program.actions if action.kind == RECOMPUTE} == {0, 2}
    kept = {life.buffer.stage for life in program.lives if life.buffer.kind == CHECKPOINT}
    assert kept == {0, 2}


def test_early_does_not_read_the_gradient():
    gradient = Buffer(ACTIVATION_GRADIENT, 1, 0)
    for early in (False, True):
        again = [one for one in lay("1f1b", early).actions if one.kind == RECOMPUTE and one.stage == 0]
        assert (gradient in again[0].reads) is not early


def test_what_is_offloaded_is_then_the_checkpoint():
    program = lay("pipeoffload", True)
    away = [action for action in program.actions if action.kind == "offload"]
    assert away and all(action.frees[0].kind == CHECKPOINT for action in away)
    back = [action.writes[0] for action in program.actions if action.kind == "reload"]
    assert {(one.kind, one.version) for one in back} == {(CHECKPOINT, 1)}
