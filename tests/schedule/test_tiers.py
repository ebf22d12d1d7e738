"""Schedules that move what a forward keeps to another worker or to the host, or drop it: BPipe, PipeOffload, Chronos.

What their papers say is held as inequalities; memory is counted from the simulator's timeline, a stash under way at
both of its ends.
"""

import random
from importlib import import_module
from inspect import getdoc

import pytest

from fourfold.schedule import Program, ScheduleError, Shape, Timeline, bind, draw, simulate, validate
from fourfold.schedule.action import EVICT, HOST, LOAD, OFFLOAD, RECOMPUTE, RELOAD, STASH, Action, Buffer
from fourfold.schedule.costs import Costs
from fourfold.schedule.figures import kept
from fourfold.schedule.tiers import offload, reload, returned, with_room
from fourfold.schedule.work import B, F, Work


def lay(name: str, p: int, m: int, v: int = 1, **settings: object) -> Program:
    module = import_module(f"fourfold.schedule.orders.{name}")
    shape = Shape(p * v, m, p, v)
    return validate(bind(module.order(shape, module.Options(m, **settings)), p), shape)


def most(timeline: Timeline) -> int:
    """The most stashes that a worker held."""
    return max(kept(timeline))


def count(program: Program, kind: str) -> int:
    return sum(action.kind == kind for action in program.actions)


TIMES = [(1, 1), (1, 2), (2, 1), (1, 3)]
"""Forward and backward of a stage."""


def times(forward: float, backward: float, copy: float = 0.0) -> Costs:
    return Costs(forward, backward / 2, backward / 2, copy=copy)


# --- the pieces


def test_what_is_on_the_host_does_not_count_on_the_worker():
    # compute | F0 .  .  .  F1 .  B0 -- B1 --      d2h | .  O0 --      h2d | .  .  .  .  .  R0
    work = Work(Shape(1, 2))
    line = [
        work.piece(F, 0, 0, 0),
        offload(0, 0, 0),
        with_room(work.piece(F, 0, 1, 0), (0, 0)),
        reload(0, 0, 0),
        returned(work.piece(B, 0, 0, 0), 1),
        work.piece(B, 0, 1, 0),
        work.update(0, 0),
    ]
    program = validate(bind(line, 1), Shape(1, 2))
    timeline = simulate(program, lambda action: {F: 2, B: 2, OFFLOAD: 1, RELOAD: 1}.get(action.kind, 0))
    assert timeline.memory(lambda buffer: int(buffer.kind == STASH))[0] == [
        (0, 1),
        (2, 2),  # the second forward begins while the first one's stash is under way
        (3, 1),
        (4, 2),  # it comes back
        (7, 1),
        (9, 0),
    ]
    assert timeline.memory(lambda buffer: int(buffer.kind == HOST))[0] == [(2, 1), (5, 0)]


def test_a_reload_waits_for_room_and_a_backward_for_its_reload():
    program = lay("pipeoffload", 4, 8, 2)
    numbers = {(a.kind, a.stage, a.microbatches.start): n for n, a in enumerate(program.actions)}
    for (kind, stage, microbatch), number in numbers.items():
        if kind == RELOAD:
            assert numbers[OFFLOAD, stage, microbatch] in program.before[number]
            assert any(program.actions[other].kind in (F, B) for other in program.before[number])
            assert number in program.before[numbers[B, stage, microbatch]]


def test_an_offloaded_stash_that_never_returns_is_found():
    work = Work(Shape(1, 1))
    line = [work.piece(F, 0, 0, 0), offload(0, 0, 0), returned(work.piece(B, 0, 0, 0), 1), work.update(0, 0)]
    with pytest.raises(ScheduleError, match="stash of stage 0, micro-batch 0, version 1, which no action writes"):
        bind(line, 1)


def test_a_backward_of_what_is_still_away_is_found():
    work = Work(Shape(1, 1))
    line = [work.piece(F, 0, 0, 0), offload(0, 0, 0), work.piece(B, 0, 0, 0), work.update(0, 0)]
    with pytest.raises(ScheduleError, match="frees the stash of stage 0, micro-batch 0, which offload .* has freed"):
        bind(line, 1)


def test_an_eviction_is_named_with_both_ends():
    moves = [str(one) for one in lay("bpipe", 4, 4).actions if one.kind in (EVICT, LOAD)]
    assert moves == [
        "evict of stash of stage 0, micro-batch 2 from worker 0 to worker 3",
        "load of stash of stage 0, micro-batch 2, version 1 from worker 3 to worker 0",
    ]


# --- BPipe

PIPES = [(p, m) for p in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16) for m in (p, 2 * p, 4 * p + 3)]


@pytest.mark.parametrize(("p", "m"), PIPES)
def test_bpipe_balances(p, m):
    balanced, plain = lay("bpipe", p, m), lay("1f1b", p, m)
    largest = min(p, m)  # of 1F1B, on its first worker
    for forward, backward in TIMES:
        expected = simulate(plain, times(forward, backward)).makespan
        instant = simulate(balanced, times(forward, backward))
        assert instant.makespan == expected
        assert most(instant) <= -(-(p + 2) // 2)
        for copy in (0.25, 0.5, 1):
            hidden = simulate(balanced, times(forward, backward, copy * min(forward, backward)))
            assert hidden.makespan == expected
            assert most(hidden) <= p / 2 + 2
        assert largest < 6 or most(hidden) < largest
    assert count(balanced, EVICT) == count(balanced, LOAD)
    assert (count(balanced, EVICT) > 0) == (p >= 4)


def test_transfers_that_do_not_hide_cost_time():
    slow = simulate(lay("bpipe", 8, 16), times(1, 2, 12)).makespan
    assert slow > simulate(lay("1f1b", 8, 16), times(1, 2)).makespan


@pytest.mark.parametrize("cap", [3, 4, 5, 6, 7, 8])
def test_an_early_worker_keeps_its_cap(cap):
    timeline = simulate(lay("bpipe", 8, 24, cap=cap), times(1, 2))
    assert kept(timeline)[:4] == [min(cap, 8 - worker) for worker in range(4)]
    assert timeline.makespan == simulate(lay("1f1b", 8, 24), times(1, 2)).makespan


# --- PipeOffload

LOOPS = [(p, v) for p in (2, 3, 4, 6, 8) for v in (2, 3, 4)]
ONE_WAY = (0, 0.25, 0.5, 1, 1.5)
"""One copy, in forwards; out and back take up to a forward and a backward: k <= 1."""


@pytest.mark.parametrize(("p", "v"), LOOPS)
def test_pipeoffload_holds_less_in_the_same_time(p, v):
    m = 4 * p
    plain = lay("interleaved", p, m, v)
    largest = most(simulate(plain, Costs()))
    assert largest == (v + 1) * p - 1
    for copy in ONE_WAY:
        peaks = []
        for share in (0.0, 0.5, 1.0):
            program = lay("pipeoffload", p, m, v, copy=copy, share=share)
            assert count(program, OFFLOAD) == count(program, RELOAD) <= share * p * v * m
            for hop in (0, 0.25):
                timeline = simulate(program, Costs(move=hop, copy=copy))
                assert timeline.makespan == simulate(plain, Costs(move=hop)).makespan  # no stall
            peaks.append(most(simulate(program, Costs(copy=copy))))
        assert largest == peaks[0] > peaks[1] >= peaks[2]
        if copy <= 1:  # out and back in two thirds of a forward and a backward
            assert peaks[2] <= (3 if copy <= 0.5 else 4)


@pytest.mark.parametrize(("p", "v"), [(p, v) for p, v in LOOPS if p >= 6 and not v % 2])
def test_half_of_the_passes_are_more_than_half_of_the_memory(p, v):
    half = lay("pipeoffload", p, 4 * p, v, share=0.5)
    assert count(half, OFFLOAD) / count(half, F) == 0.5
    assert most(simulate(half, Costs(copy=0.5))) == v // 2 * p + 2 < ((v + 1) * p - 1) / 2


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_on_fewer_workers_with_a_group(p):
    """Transfers between workers are free here."""
    half = lay("pipeoffload", p, 4 * p, 2, share=0.5, group=p)
    assert count(half, OFFLOAD) / count(half, F) == 0.5
    timeline, plain = (simulate(program, Costs(copy=0.5)) for program in (half, lay("interleaved", p, 4 * p, 2)))
    assert timeline.makespan == plain.makespan
    assert most(timeline) == p < most(plain) / 2


@pytest.mark.parametrize("seed", range(10))
def test_copies_finish_before_their_backward(seed):
    """Also where all times are other than planned."""
    draws = random.Random(seed)
    program = lay("pipeoffload", 4, 12, 3)
    timeline = simulate(program, [draws.expovariate(1) for _ in program.actions])
    back = {(a.stage, a.microbatches.start): end for a, _, end in timeline if a.kind == RELOAD}
    starts = {(a.stage, a.microbatches.start): start for a, start, _ in timeline if a.kind == B}
    assert len(back) > 50
    assert all(end <= starts[place] for place, end in back.items())


def test_slow_copies_are_few():
    offloads = [count(lay("pipeoffload", 8, 32, 2, copy=copy), OFFLOAD) for copy in (0.5, 2, 8, 32)]
    assert offloads == sorted(offloads, reverse=True)
    assert offloads[-1] == 0 < offloads[-2]


@pytest.mark.parametrize("copy", [1.5, 2, 3, 4])
@pytest.mark.parametrize(("p", "v", "group"), [(4, 2, None), (8, 4, None), (8, 4, 8)])
def test_slow_copies_stall_nothing(p, v, group, copy):
    """What could not be back in time stays, so that less is offloaded and no time is lost, whatever a copy takes."""
    program = lay("pipeoffload", p, 4 * p, v, group=group, copy=copy)
    assert count(program, OFFLOAD)
    plain = simulate(lay("interleaved", p, 4 * p, v), Costs())
    assert simulate(program, Costs(copy=copy)).makespan == plain.makespan


@pytest.mark.parametrize(("p", "group"), [(p, group) for p in (2, 3, 4, 6, 8) for group in range(-(-p // 2), p + 1)])
def test_smaller_groups_hold_less_and_idle_more(p, group):
    m = group * 8
    timeline = simulate(lay("pipeoffload", p, m, 2, group=group, share=0.0), Costs())
    whole = 6 * m + 3 * (p - 1)  # `interleaved`, if m were a multiple of p
    assert most(timeline) == p + group
    assert timeline.makespan >= whole
    if 3 * group >= 2 * p:  # a group takes 3 units a pass, a micro-batch needs 2 a worker to come home
        assert timeline.makespan == whole + 3 * (p - group)


# --- ChronosPipe


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (1, 2, 3, 4, 5, 6, 8, 11, 16) for m in (p, p + 1, 2 * p, 4 * p)])
def test_chronospipe_holds_less_at_the_same_bubble(p, m):
    timeline = simulate(lay("chronospipe", p, m, 2, recompute=False), Costs())
    stage = Costs(2, 2, 2)  # one of 1F1B's is two of these
    plain = simulate(lay("1f1b", p, m), stage)
    assert timeline.makespan == plain.makespan
    assert most(timeline) <= (3 * p + 3) // 2
    if p >= 3:
        assert most(timeline) < 2 * most(plain)
    if m % p == 0 and p >= 3:
        assert most(timeline) < most(simulate(lay("interleaved", p, m, 2), Costs()))


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_chronospipe_and_interleaved_at_equal_makespan(p):
    """The same batch cut into half as many micro-batches gives `interleaved` the bubble of ChronosPipe."""
    timeline = simulate(lay("chronospipe", p, 4 * p, 2, recompute=False), Costs())
    plain = simulate(lay("interleaved", p, 2 * p, 2), Costs(2, 2, 2))
    assert timeline.makespan == plain.makespan
    assert most(timeline) < 2 * most(plain)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (2, 3, 4, 6, 8, 12) for m in (2 * p, 4 * p)])
def test_chronospipe_recomputes_the_early_layers_only(p, m):
    program = lay("chronospipe", p, m, 2)
    timeline, full = simulate(program, Costs()), simulate(lay("1f1b", p, m), Costs(2, 3, 3))
    assert {action.stage for action in program.actions if action.kind == RECOMPUTE} == set(range(p))
    assert count(program, RECOMPUTE) == count(program, F) / 2  # half of full recompute
    assert most(timeline) <= p // 2 + 1  # of 2 p in 1F1B
    assert timeline.makespan < full.makespan


# --- all three

DRAWN = {
    "bpipe": ((4, 6, 1), Costs(1, 0.5, 0.5, update=1, copy=1), ("compute", "evict 3", "load 0")),
    "chronospipe": ((2, 2, 2), Costs(update=1), ("compute",)),
    "pipeoffload": ((2, 2, 2), Costs(update=1, copy=0.5), ("compute", "d2h", "h2d")),
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_drawings_in_the_docstring_are_the_simulators(name):
    shape, costs, lanes = DRAWN[name]
    text = getdoc(import_module(f"fourfold.schedule.orders.{name}"))
    assert text is not None
    timeline = simulate(lay(name, *shape), costs)
    assert [part.lstrip() for part in text.split("```")[1::2]] == [draw(timeline, lane=lane) for lane in lanes]


@pytest.mark.parametrize(
    ("name", "shape", "settings", "message"),
    [
        ("bpipe", Shape(8, 8, 4, 2), {}, "bpipe: expected one stage a worker, found 2; try chunks: 1"),
        ("bpipe", Shape(8, 8, 4), {}, "expected 1 stages on each, 4 in all, found 8"),
        (
            "bpipe",
            Shape(4, 4, 4),
            {"cap": 2},
            "cap: expected at least 3, so that loads run ahead of backwards, found 2",
        ),
        ("chronospipe", Shape(4, 4, 4, 2), {}, "expected 2 stages on each, 8 in all, found 4"),
        ("pipeoffload", Shape(8, 8, 4, 2), {"group": 1}, "expected a group of 2 to 4 micro-batches, found 1; try 2"),
        ("pipeoffload", Shape(8, 8, 4, 2), {"group": 5}, "expected a group of 2 to 4 micro-batches, found 5; try 4"),
        ("pipeoffload", Shape(8, 7, 4, 2), {"group": 3}, "a multiple of 3, found 7; try 6 micro-batches"),
        ("pipeoffload", Shape(8, 8, 4, 2), {"share": 1.5}, "share: expected a part from 0 to 1, found 1.5"),
        ("pipeoffload", Shape(8, 8, 4, 2), {"copy": -1.0}, "copy: expected a time, in times of a forward, found -1.0"),
    ],
)
def test_what_does_not_fit_is_refused(name, shape, settings, message):
    module = import_module(f"fourfold.schedule.orders.{name}")
    with pytest.raises(ValueError) as caught:
        list(module.order(shape, module.Options(shape.microbatches, **settings)))
    assert message in str(caught.value)


def test_tokens_and_host_copies_are_named():
    action = with_room(Action(F, 0, range(1)), (3, 1))
    assert [str(buffer) for buffer in action.writes] == ["room of stage 3, micro-batch 1"]
    assert str(Buffer(HOST, 2, 5)) == "host of stage 2, micro-batch 5"
