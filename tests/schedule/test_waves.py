"""Orders with several stages or copies a worker: ZB-V, V-Half, V-Min, Hanayo, Chimera, DualPipe, DualPipeV.

[DES] marks figures that an independent simulator found; "frozen" marks regression values outside of their conditions.
All times are of a worker's whole share: a stage of one of several on a worker takes its part of them.
"""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from importlib import import_module
from inspect import getdoc
from itertools import accumulate
from math import prod
from typing import NamedTuple

import pytest
import torch
from torch.distributed.pipelining import schedules

from fourfold.schedule import (
    Action,
    Program,
    ScheduleError,
    Shape,
    Virtual,
    bind,
    draw,
    drive,
    simulate,
    validate,
)
from fourfold.schedule.program import Lane
from fourfold.schedule.work import B, F, I, W, Work

STAGES = {"zb_v": 2, "v_half": 2, "v_min": 2, "hanayo": 2, "chimera": 1, "dualpipe": 1, "dualpipev": 2}
"""Stages a worker; Hanayo's with one wave."""
EVEN, UNEVEN = (1, 1, 1), (1, Fraction(6, 5), Fraction(4, 5))
"""Forward, backward of the input, backward of the weight."""


def lay(name: str, p: int, m: int, waves: int = 1) -> tuple[Program, Shape]:
    order, options = (getattr(import_module(f"fourfold.schedule.orders.{name}"), part) for part in ("order", "Options"))
    settings = {"waves": waves} if name == "hanayo" else {}
    shape = Shape(STAGES[name] * waves * p, m, p, STAGES[name] * waves)
    return validate(bind(order(shape, options(m, **settings)), p), shape), shape


class Figures(NamedTuple):
    """In units of `times`, a whole worker's pass.

    Attributes:
        makespan: to the end of the last piece.
        excess: of the makespan over the work of one worker.
        span: the longest that a worker idles between its first piece and its last.
        held: the most forwards whose backward is not complete, per worker, in stages.
    """

    makespan: Fraction
    excess: Fraction
    span: Fraction
    held: list[int]


Times = tuple[float | Fraction, ...]
"""(F, B) or (F, I, W)."""


def costs(times: Times) -> dict[str, float]:
    forward, *backward = map(float, times)
    return {F: forward, B: sum(backward), I: backward[0], W: backward[-1], "move": 0, "reduce": 0}


def measure(name: str, p: int, m: int, times: Times, waves: int = 1) -> Figures:
    """Figures of an order; updates, reductions and transfers are free."""
    program, shape = lay(name, p, m, waves)
    ticks = 5 * shape.chunks  # a whole number of them a piece, so that sums are exact
    cost = {**costs(tuple(time * 5 for time in times)), "update": 0}
    timeline = simulate(program, lambda action: round(cost[action.kind]))
    work = [timeline.busy(worker) for worker in range(p)]
    spans, held = [], []
    for worker in range(p):
        line = [n for n in program.lanes[Lane(worker, "compute")] if program.actions[n].kind in (F, B, I, W)]
        steps = [{F: 1, I: 0}.get(program.actions[n].kind, -1) for n in line]
        held.append(max(accumulate(steps)))
        ends = [timeline.ends[line[-1]], timeline.starts[line[0]]]
        spans.append((ends[0] or 0) - (ends[1] or 0) - work[worker])
    makespan, excess, span = (
        Fraction(time) / ticks for time in (timeline.makespan, timeline.makespan - max(work), max(spans))
    )
    return Figures(makespan, excess, span, held)


def per_worker(program: Program) -> list[list[tuple[str, int, int]]]:
    lines: list[list[tuple[str, int, int]]] = [[] for _ in range(program.workers)]
    for action in program.actions:
        if action.kind in (F, B, I, W):
            lines[action.worker].append((action.kind, action.stage, action.microbatches.start))
    return lines


GRID = [(p, m) for p in (2, 3, 4, 6, 8) for m in (2 * p - 1, 2 * p, 3 * p + 1, 5 * p)]
EVEN_WORKERS = [(p, m) for p in (4, 6, 8, 10, 14) for m in (p, 2 * p, 3 * p + 1)]


@pytest.mark.parametrize(("p", "m"), GRID)
def test_zb_v(p, m):
    even = measure("zb_v", p, m, EVEN)
    assert (even.span, even.excess) == (0, Fraction(p - 1, 2))  # [DES]
    assert even.held == [2 * p] * p  # [DES]
    assert measure("zb_v", p, m, UNEVEN).span == (p - 1) * (UNEVEN[1] - UNEVEN[2])  # [DES]


@pytest.mark.parametrize(("p", "m"), EVEN_WORKERS)
def test_v_half(p, m):
    found = measure("v_half", p, m, EVEN)
    assert found.excess == Fraction(3 * p - 7, 2)  # [DES]
    assert max(found.held) == 2 * ((p + 2) // 2)  # [DES]


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in range(2, 11) for m in (p, 2 * p, 3 * p + 1)])
def test_v_min(p, m):
    found = measure("v_min", p, m, EVEN)
    # [DES] for p = 4, 8: (4 p - 5) / 2, and for p = 6: 8.5; the others frozen
    assert found.excess == Fraction(4 * p - 5, 2) - (p % 3 == 0)
    assert max(found.held) == 2 * ((p + 4) // 3)  # [DES]


@pytest.mark.parametrize(("m", "excess"), [(8, "10.4"), (16, "15.2"), (32, "24.8")])
def test_v_min_with_unequal_times_idles_every_period(m, excess):
    assert measure("v_min", 4, m, UNEVEN).excess == Fraction(excess)  # [DES]


@pytest.mark.parametrize("p", [*range(1, 12), 16])
@pytest.mark.parametrize("name", ["v_half", "v_min"])
def test_blocks_fit_any_number_of_workers(name, p):
    bound = 2 * ((p + 2) // 2) if name == "v_half" else 2 * ((p + 4) // 3)
    for m in (1, p, 2 * p + 1):
        assert max(measure(name, p, m, EVEN).held) <= bound


@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize(("p", "m"), [(p, p * rounds) for p in (2, 3, 4, 8) for rounds in (1, 2, 4)])
def test_hanayo(p, m, waves):
    found = measure("hanayo", p, m, (1, 1), waves)
    assert found.makespan == 2 * m + Fraction(2 * (p - 1), 2 * waves)  # [DES]
    assert max(found.held) == p * 2 * waves  # [DES]: p shares of a worker
    if waves == 1:  # [DES] for F : B = 1 : 2 and m = p; the others frozen
        for f, b in ((1, 2), (2, 3)):
            assert measure("hanayo", p, m, (f, b)).excess == (p - 1) * (b + (m // p - 1) * (b - f))


@pytest.mark.parametrize(("p", "m", "waves"), [(2, 3, 1), (3, 3, 2), (4, 8, 1), (4, 8, 3)])
def test_hanayo_turns_without_a_transfer(p, m, waves):
    program, _ = lay("hanayo", p, m, waves)
    assert sum(action.source is not None for action in program.actions) == 2 * m * 2 * waves * (p - 1)


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_chimera(p, rounds):
    m = rounds * p
    even = measure("chimera", p, m, (1, 1))
    assert even.excess / even.makespan == Fraction(p - 2, 2 * m + p - 2)  # [DES]
    half = [min(worker, p - 1 - worker) for worker in range(p)]
    assert even.held == [p // 2 + 1 + place for place in half]  # [DES]: p / 2 + 1 to p, largest in the middle
    for f, b in ((1, 1), (1, 2), (2, 3)):  # [DES] for m = p; the others frozen
        assert measure("chimera", p, m, (f, b)).excess == (p - 2) * (b + (rounds - 1) * (b - f))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (2, 4, 6, 8) for m in (2 * p, 2 * p + 2, 5 * p)])
def test_dualpipe(p, m):
    for times in (EVEN, UNEVEN):
        f, i, w = times
        found = measure("dualpipe", p, m, times)
        # published, with a pair F&B that takes at most F + B: (p / 2 - 1)(F&B + B - 3 W)
        assert found.excess <= (p // 2 - 1) * (f + (i + w) + (i + w) - 3 * w)
        assert found.held == [p + 1] * p  # [DES] (as DualPipeV, p stages)
        assert found.excess == (p // 2 - 1) * (f + i - w)  # frozen: pairs one after the other


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (2, 3, 4, 8) for m in (2 * p, 2 * p + 1, 5 * p)])
def test_dualpipev(p, m):
    found = measure("dualpipev", p, m, EVEN)
    assert found.held == [2 * p + 1] * p  # [DES]
    assert found.excess == {2: Fraction(1, 2), 3: 1, 4: Fraction(3, 2), 8: Fraction(7, 2)}[p]  # [DES] for p = 4, 8
    assert found.excess == measure("dualpipe", 2 * p, 2 * m, EVEN).excess / 2  # what it was cut from


class Stub:
    """What torch's schedules ask of a stage before they run."""

    submod = None

    def __init__(self, stage: int, p: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = stage, 2 * p, p, 0
        self.is_first, self.is_last = stage == 0, stage == 2 * p - 1


def torch_lines(name: str, p: int, m: int) -> list[list[tuple[str, int, int]]]:
    kinds = {"FORWARD": F, "FULL_BACKWARD": B, "BACKWARD_INPUT": I, "BACKWARD_WEIGHT": W}

    def flat(actions) -> Iterator[tuple[str, int, int]]:
        for action in actions:
            if action is not None and action.sub_actions:
                yield from flat(action.sub_actions)
            elif action is not None:
                yield kinds[action.computation_type.name], action.stage_index, action.microbatch_index

    schedule = getattr(schedules, name)([Stub(0, p), Stub(2 * p - 1, p)], m, loss_fn=torch.nn.MSELoss())
    return [list(flat(schedule.pipeline_order[worker])) for worker in range(p)]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_zb_v_is_torchs(p):
    for m in (1, p, 2 * p - 1, 2 * p, 3 * p + 1):
        assert per_worker(lay("zb_v", p, m)[0]) == torch_lines("ScheduleZBVZeroBubble", p, m)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_dualpipev_is_torchs(p):
    for m in (2 * p, 2 * p + 1, 5 * p):
        assert per_worker(lay("dualpipev", p, m)[0]) == torch_lines("ScheduleDualPipeV", p, m)


def staircase(name: str, p: int, m: int, times: Times) -> str:
    cost = {**costs(times), "update": 1}
    return draw(simulate(lay(name, p, m)[0], lambda action: cost[action.kind]))


DRAWN = {
    "zb_v": (2, 3, EVEN),
    "v_half": (3, 2, EVEN),
    "v_min": (3, 2, EVEN),
    "hanayo": (3, 3, (1, 1)),
    "chimera": (4, 4, (1, 1)),
    "dualpipe": (4, 8, EVEN),
    "dualpipev": (2, 4, EVEN),
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_drawing_in_the_docstring_is_the_simulators(name):
    text = getdoc(import_module(f"fourfold.schedule.orders.{name}"))
    assert text is not None and text.split("```")[1].lstrip() == staircase(name, *DRAWN[name])


FROZEN = [
    # fewer than 2 p - 1 micro-batches do not fill it
    (
        "zb_v",
        3,
        2,
        EVEN,
        "3",
        """
0 | F0.0 F0.1 .    .    .    F5.0 I5.0 W5.0 F5.1 I5.1 W5.1 .    .    I0.0 W0.0 .    I0.1 W0.1 U    U
1 | .    F1.0 F1.1 .    F4.0 .    F4.1 I4.0 W4.0 .    I4.1 W4.1 I1.0 W1.0 .    I1.1 W1.1 U    U    .
2 | .    .    F2.0 F3.0 F2.1 F3.1 .    .    I3.0 W3.0 I2.0 W2.0 I3.1 W3.1 I2.1 W2.1 U    U    .    .
""",
    ),
    # p < 4
    (
        "v_half",
        2,
        3,
        EVEN,
        "1/2",
        """
0 | F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I0.0 I3.1 W0.0 W3.1 F3.2 I3.2 I0.1 W0.1 I0.2 W3.2 W0.2 U    U    .
1 | .    F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 W2.0 W1.0 F1.2 F2.2 I2.1 I1.1 I2.2 I1.2 W2.1 W1.1 W2.2 W1.2 U    U
""",
    ),
    # p odd
    (
        "v_half",
        3,
        2,
        EVEN,
        "3",
        """
0 | F0.0 F0.1 .    .    .    F5.0 I5.0 W5.0 .    .    F5.1 I5.1 I0.0 W0.0 W5.1 .    I0.1 W0.1 U    U
1 | .    F1.0 F1.1 .    F4.0 .    .    I4.0 W4.0 F4.1 I1.0 W1.0 I4.1 W4.1 .    I1.1 W1.1 U    U    .
2 | .    .    F2.0 F3.0 F2.1 F3.1 .    .    I3.0 I2.0 W3.0 W2.0 .    I3.1 I2.1 W3.1 W2.1 U    U    .
""",
    ),
    # p does not divide m
    (
        "hanayo",
        2,
        3,
        (1, 1),
        "2",
        """
0 | F0.0 F0.1 .    F3.0 B3.0 F3.1 B3.1 B0.0 F0.2 B0.1 .    F3.2 B3.2 .    .    B0.2 U    U
1 | .    F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1 F1.2 F2.2 .    .    B2.2 B1.2 U    U    .
""",
    ),
    # B = 2 F beyond m = p
    (
        "hanayo",
        2,
        3,
        (1, 2),
        "7/2",
        """
0 | F0.0 F0.1 .    F3.0 B3.0 --   F3.1 B3.1 --   .    B0.0 --   F0.2 .    B0.1 --   F3.2 B3.2 --   .    .    .    .    B0.2 --   U    U
1 | .    F1.0 F2.0 F1.1 F2.1 .    B2.0 --   B1.0 --   B2.1 --   B1.1 --   F1.2 F2.2 .    .    .    B2.2 --   B1.2 --   U    U    .    .
""",  # noqa: E501
    ),
    # p does not divide m
    (
        "chimera",
        4,
        6,
        (1, 1),
        "4",
        """
0 | F0.0 F0.2 .    F3.1 B3.1 F3.3 B3.3 B0.0 F0.4 B0.2 .    F3.5 B3.5 R3.1 .    B0.4 U    U
1 | .    F1.0 F2.1 F1.2 F2.3 B2.1 B1.0 B2.3 B1.2 F1.4 F2.5 .    .    B2.5 B1.4 U    U    .
2 | .    F1.1 F2.0 F1.3 F2.2 B2.0 B1.1 B2.2 B1.3 F1.5 F2.4 .    .    B2.4 B1.5 U    U    .
3 | F0.1 F0.3 .    F3.0 B3.0 F3.2 B3.2 B0.1 F0.5 B0.3 .    F3.4 B3.4 R3.0 .    B0.5 U    U
""",
    ),
    # B = 2 F beyond m = p
    (
        "chimera",
        4,
        8,
        (1, 2),
        "6",
        """
0 | F0.0 F0.2 .    F3.1 B3.1 --   F3.3 B3.3 --   .    B0.0 --   F0.4 .    B0.2 --   F0.6 F3.5 B3.5 --   F3.7 B3.7 --   R3.1 B0.4 --   .    .    B0.6 --   U    U
1 | .    F1.0 F2.1 F1.2 F2.3 .    B2.1 --   B1.0 --   B2.3 --   B1.2 --   F1.4 F2.5 .    F1.6 F2.7 .    B2.5 --   B1.4 --   B2.7 --   B1.6 --   U    U    .    .
2 | .    F1.1 F2.0 F1.3 F2.2 .    B2.0 --   B1.1 --   B2.2 --   B1.3 --   F1.5 F2.4 .    F1.7 F2.6 .    B2.4 --   B1.5 --   B2.6 --   B1.7 --   U    U    .    .
3 | F0.1 F0.3 .    F3.0 B3.0 --   F3.2 B3.2 --   .    B0.1 --   F0.5 .    B0.3 --   F0.7 F3.4 B3.4 --   F3.6 B3.6 --   R3.0 B0.5 --   .    .    B0.7 --   U    U
""",  # noqa: E501
    ),
    # B < F
    (
        "chimera",
        4,
        4,
        (2, 1),
        "4",
        """
0 | F0.0 --   F0.2 --   .    .    F3.1 --   B3.1 .    F3.3 --   B3.3 B0.0 .    B0.2 U    U
1 | .    .    F1.0 --   F2.1 --   F1.2 --   F2.3 --   B2.1 B1.0 .    B2.3 B1.2 U    U    .
2 | .    .    F1.1 --   F2.0 --   F1.3 --   F2.2 --   B2.0 B1.1 .    B2.2 B1.3 U    U    .
3 | F0.1 --   F0.3 --   .    .    F3.0 --   B3.0 .    F3.2 --   B3.2 B0.1 .    B0.3 U    U
""",
    ),
]


@pytest.mark.parametrize(("name", "p", "m", "times", "excess", "drawing"), FROZEN)
def test_frozen_beyond_the_conditions(name, p, m, times, excess, drawing):
    assert measure(name, p, m, times).excess == Fraction(excess)
    assert staircase(name, p, m, times) == drawing.lstrip()


class Store(Virtual):
    """Runs layers y = w x in whole numbers; each worker has what was written or moved there, until its last use."""

    def __init__(self, program: Program, shape: Shape, given: list[int]) -> None:
        super().__init__(program.workers, lambda action: 0.25 if action.source is not None else 1.0)
        self.last, self.given = shape.stages - 1, given
        self.uses = Counter(
            (buffer, action.where) for action in program.actions for buffer in {*action.reads, *action.frees}
        )
        self.values = {
            (buffer, worker): buffer.stage + 2
            for buffer, worker in self.uses
            if (buffer.kind, buffer.version) == ("weight", 0)
        }

    def next(self):
        completion = super().next()
        self.perform(completion.action)
        return completion

    def perform(self, action: Action) -> None:
        values = {(buffer.kind, buffer.microbatch): self.values[buffer, action.where] for buffer in action.reads}
        weight = values.get(("weight", -1), 0)
        batch, at_end = action.microbatches[0], action.stage == self.last
        if action.kind == F:
            x = values["activation", batch] if action.stage else self.given[batch]
            made = {"stash": x, "activation": weight * x}
        elif action.kind in (B, I):
            slope = 1 if at_end else values["activation-gradient", batch]
            x = values["stash", batch]
            made = {"gradient": slope * x, "deferred": slope * x, "activation-gradient": slope * weight}
        elif action.kind == W:
            made = {"gradient": values["deferred", batch]}
        elif action.kind == "update":
            made = {"weight": weight - sum(value for (kind, _), value in values.items() if kind != "weight")}
        else:  # a sum, or a move of one value
            made = {buffer.kind: sum(values.values()) for buffer in action.writes}
        for buffer in action.writes:
            self.values[buffer, action.worker] = made[buffer.kind]
        for copy in ((buffer, action.where) for buffer in {*action.reads, *action.frees}):
            self.uses[copy] -= 1
            assert self.uses[copy] == 0 or copy[0] not in action.frees
            if not self.uses[copy]:
                del self.values[copy]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 10)])
@pytest.mark.parametrize("name", STAGES)
def test_every_copy_of_every_weight_is_updated_as_serially(name, p, m):
    program, shape = lay(name, p, m)
    given = [3 * k + 1 for k in range(m)]
    store = Store(program, shape, given)
    drive(program, store)
    weights = range(2, shape.stages + 2)
    gradient = {stage: prod(weights) // weights[stage] * sum(given) for stage in range(shape.stages)}
    copies = 2 if name in ("chimera", "dualpipe") else 1
    assert len(store.values) == copies * shape.stages
    for (buffer, _), value in store.values.items():
        assert (buffer.kind, buffer.version) == ("weight", 1)
        assert value == weights[buffer.stage] - gradient[buffer.stage]


def test_only_weights_have_copies_and_one_a_worker():
    work = Work(Shape(1, 1, 2))
    pieces = [work.forward(0, 0, 0), work.backward(0, 0, 0)]
    bind([*pieces, work.update(0, 0), work.update(0, 1)], 2)
    with pytest.raises(ScheduleError, match="writes the weight of stage 0, version 1, which another action has"):
        bind([*pieces, work.update(0, 0), work.update(0, 0)], 2)
    with pytest.raises(ScheduleError, match="writes the gradient of stage 0, micro-batch 0, which another action has"):
        bind([*pieces, work.backward(0, 0, 1)], 2)


def test_copies_exchange_one_sum_each():
    program, _ = lay("chimera", 4, 8)
    moved = [
        action for action in program.actions if action.source is not None and action.reads[0].kind == "gradient-sum"
    ]
    assert sorted((action.stage, action.source, action.worker) for action in moved) == sorted(
        (stage, *ends) for stage in range(4) for ends in ((stage, 3 - stage), (3 - stage, stage))
    )


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("zb_v", Shape(6, 8, 4, 2), "zb_v on 4 workers: expected 2 stages on each, 8 in all, found 6; try 8 stages"),
        ("v_half", Shape(4, 8, 4, 1), "expected 2 stages on each, 8 in all, found 4"),
        ("v_min", Shape(12, 8, 4, 3), "expected 2 stages on each, 8 in all, found 12"),
        ("hanayo", Shape(4, 8, 4, 1), "expected 2 stages on each, 8 in all, found 4"),
        ("chimera", Shape(3, 4, 3), "an even number of workers and as many stages, found 3 and 3; try 4 of both"),
        ("chimera", Shape(8, 4, 4, 2), "found 4 and 8; try 4 of both"),
        ("chimera", Shape(4, 5, 4), "expected an even number of at least 2, found 5; try 6"),
        ("dualpipe", Shape(4, 6, 4), "expected an even number of at least 8, found 6; try 8"),
        ("dualpipev", Shape(8, 7, 4, 2), "at least as many micro-batches as stages, 8, found 7; try 8 micro-batches"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, shape, message):
    module = import_module(f"fourfold.schedule.orders.{name}")
    with pytest.raises(ScheduleError) as caught:
        list(module.order(shape, module.Options(shape.microbatches)))
    assert message in str(caught.value)
