"""Closed forms of makespan, idle time and micro-batches in flight, and torch's own orders, against the simulator.

Each form is exact within its stated conditions ([DES]: an independent simulator found it); what orders do beyond them
is frozen with a drawing. Transfers and updates are free. Times are of one stage, so that a worker's share of v stages
takes v times as long; with whole numbers, all sums are exact.
"""

from collections.abc import Callable
from importlib import import_module
from inspect import getdoc
from typing import NamedTuple

import pytest
import torch
from torch.distributed.pipelining import schedules

from fourfold.schedule import Program, ScheduleError, Shape, Timeline, bind, draw, simulate, validate
from fourfold.schedule.figures import bubble, excess, held, passes, span_bubble
from fourfold.schedule.work import B, F, I, Piece, W, inputs


class Times(NamedTuple):
    """Of one stage and micro-batch: forward, backward of the input, backward of the weight."""

    f: int
    i: int
    w: int

    @property
    def all(self) -> int:
        return sum(self)


class Case(NamedTuple):
    """p workers, m micro-batches, v stages a worker."""

    p: int
    m: int
    v: int


Formula = Callable[[Case, Times], float]


class Form(NamedTuple):
    """What is known of an order in closed form.

    Attributes:
        order: its name.
        chunks: the v that are tried.
        fits: which cases the order takes and the formulas hold for.
        held: the most stages in flight, on each worker.
        makespan, bubble, span: as `figures` defines them, and whether they hold for these times.
        times: the times that the formulas hold for.
    """

    order: str
    chunks: tuple[int, ...]
    fits: Callable[[Case], bool]
    held: Callable[[Case], list[int]]
    makespan: Formula | None = None
    bubble: Formula | None = None
    span: Formula | None = None
    times: Callable[[Times], bool] = lambda t: True


def filled(case: Case, t: Times) -> float:
    return case.m * case.v * t.all + (case.p - 1) * t.all


def share(case: Case, t: Times) -> float:
    return (case.p - 1) / (case.v * case.m + case.p - 1)


def weight_is_shortest(t: Times) -> bool:
    return t.w <= min(t.f, t.i)


FORMS = [
    Form("gpipe", (1,), lambda c: True, lambda c: [c.m] * c.p, filled, share),
    Form("1f1b", (1,), lambda c: True, lambda c: [min(c.m, c.p - r) for r in range(c.p)], filled, share),
    Form(
        "interleaved",
        (1, 2, 3, 4),
        lambda c: c.m % c.p == 0,
        lambda c: [min(c.m * c.v, (c.v - 1) * c.p + 2 * (c.p - 1 - r) + 1) for r in range(c.p)],
        filled,
        share,
    ),
    Form("breadth_first", (1, 2, 3, 4), lambda c: c.m >= c.p, lambda c: [c.m * c.v] * c.p, filled, share),
    Form(
        "zb_h1",
        (1,),
        lambda c: c.m >= c.p,
        lambda c: [c.p] * c.p,
        span=lambda c, t: (c.p - 1) * (t.f + t.i - t.w),
        times=weight_is_shortest,
    ),
    Form(
        "zb_h2",
        (1,),
        lambda c: c.m >= 2 * c.p - 1,
        lambda c: [2 * c.p - 1] * c.p,
        span=lambda c, t: (c.p - 1) * max(t.f + t.i - 2 * t.w, 0),
    ),
    Form(
        "zb_1p",
        (1, 2, 3, 4),
        lambda c: c.m >= c.p and c.m % c.p == 0,
        lambda c: [c.p * c.v] * c.p,
        span=lambda c, t: (c.p - 1) * (t.f + t.i - t.w),
        times=weight_is_shortest,
    ),
]

WORKERS = (1, 2, 3, 4, 6, 8)
TIMES = [Times(*t) for t in ((1, 1, 0), (1, 1, 1), (5, 6, 4), (2, 3, 1), (1, 2, 1), (3, 2, 1), (3, 4, 3), (1, 1, 2))]
"""t_f : t_b = 1 : 1, 1 : 2, 1 : 2, 1 : 2, 1 : 3, 1 : 1, 3 : 7, 1 : 3."""


def grid(form: Form) -> list[Case]:
    cases = (
        Case(p, m, v)
        for p in WORKERS
        for m in sorted({1, 2, p, p + 1, 2 * p - 1, 2 * p, 3 * p, 4 * p + 1, 5 * p})
        for v in form.chunks
    )
    return [case for case in cases if form.fits(case)]


def lay(order: str, case: Case) -> Program:
    module = import_module(f"fourfold.schedule.orders.{order}")
    shape = Shape(case.p * case.v, case.m, case.p, case.v)
    return validate(bind(module.order(shape, module.Options(case.m)), case.p), shape)


def run(program: Program, t: Times, update: float = 0) -> Timeline:
    costs = {F: t.f, B: t.i + t.w, I: t.i, W: t.w, "move": 0, "update": update}
    return simulate(program, lambda action: costs[action.kind])


def check(form: Form, case: Case) -> int:
    """Hold an order to its forms for one case and all times; returns for how many."""
    program = lay(form.order, case)
    assert held(program) == form.held(case)
    fitting = [t for t in TIMES if form.times(t)]
    for t in fitting:
        timeline = run(program, t)
        found = (timeline.makespan, span_bubble(timeline), bubble(timeline))
        for value, formula in zip(found[:2], (form.makespan, form.span), strict=True):
            assert formula is None or value == formula(case, t), (case, t)
        assert form.bubble is None or found[2] == pytest.approx(form.bubble(case, t), rel=1e-12, abs=1e-12), (case, t)
    return len(fitting)


@pytest.mark.parametrize(
    ("form", "case"),
    [
        pytest.param(form, case, id=f"{form.order}-p{case.p}-m{case.m}-v{case.v}")
        for form in FORMS
        for case in grid(form)
    ],
)
def test_closed_forms(form, case):
    assert check(form, case) >= 6  # of the eight times


def test_a_wrong_form_is_found():
    by_name = {form.order: form for form in FORMS}
    case = Case(4, 8, 1)
    for wrong in (
        by_name["zb_h1"]._replace(order="1f1b"),
        by_name["gpipe"]._replace(order="1f1b"),
        by_name["zb_h1"]._replace(span=by_name["zb_h2"].span),
        by_name["1f1b"]._replace(bubble=lambda c, t: (c.p - 1) / (c.m + c.p)),
        by_name["1f1b"]._replace(makespan=lambda c, t: filled(c, t) + 1),
    ):
        with pytest.raises(AssertionError):
            check(wrong, case)


def test_figures_of_a_pipeline_by_hand():
    # 0 | F0 F1 .  B0 F2 B1 .  B2
    # 1 | .  F0 B0 F1 B1 F2 B2 .
    program = lay("1f1b", Case(2, 3, 1))
    timeline = run(program, Times(1, 1, 0))
    assert (timeline.makespan, excess(timeline), span_bubble(timeline)) == (8, 2, 2)
    assert bubble(timeline) == pytest.approx(4 / 16)
    assert held(program) == [2, 1]
    assert [str(program.actions[number].kind) for number in passes(program, 1)] == [F, B] * 3


def test_memory_over_time_by_hand():
    program = lay("1f1b", Case(2, 3, 1))
    stashes = run(program, Times(1, 1, 0)).memory(lambda buffer: int(buffer.kind == "stash"))
    assert stashes[0] == [(0, 1), (1, 2), (4, 1), (4, 2), (6, 1), (8, 0)]
    assert stashes[1] == [(1, 1), (3, 0), (3, 1), (5, 0), (5, 1), (7, 0)]


FROZEN = [
    # fewer micro-batches than workers: a worker idles between its chunks
    (
        "breadth_first",
        Case(3, 1, 2),
        Times(1, 1, 0),
        """
0 | F0.0 .    .    F3.0 .    .    .    .    B3.0 .    .    B0.0 U    U
1 | .    F1.0 .    .    F4.0 .    .    B4.0 .    .    B1.0 U    U    .
2 | .    .    F2.0 .    .    F5.0 B5.0 .    .    B2.0 U    U    .    .
""",
    ),
    # fewer micro-batches than workers
    (
        "zb_h1",
        Case(3, 2, 1),
        Times(1, 1, 1),
        """
0 | F0 F1 .  .  .  I0 W0 I1 W1 U
1 | .  F0 F1 .  I0 .  I1 W0 W1 U
2 | .  .  F0 I0 F1 I1 W0 W1 U  .
""",
    ),
    # the weight takes longest
    (
        "zb_h1",
        Case(3, 4, 1),
        Times(1, 1, 2),
        """
0 | F0 F1 F2 .  .  I0 W0 -- F3 I1 W1 -- I2 W2 -- I3 W3 -- U
1 | .  F0 F1 .  I0 F2 I1 W0 -- F3 I2 W1 -- I3 W2 -- W3 -- U
2 | .  .  F0 I0 F1 I1 F2 I2 W0 -- F3 I3 W1 -- W2 -- W3 -- U
""",
    ),
    # fewer than 2 p - 1 micro-batches
    (
        "zb_h2",
        Case(3, 3, 1),
        Times(1, 1, 1),
        """
0 | F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2 U  .
1 | .  F0 F1 F2 I0 .  I1 .  I2 W0 W1 W2 U
2 | .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2 U  .
""",
    ),
    # the weight takes longest
    (
        "zb_1p",
        Case(2, 2, 2),
        Times(1, 1, 2),
        """
0 | F0.0 F0.1 F2.0 F2.1 .    I2.0 W2.0 --   I2.1 W2.1 --   I0.0 W0.0 --   I0.1 W0.1 --   U    U
1 | .    F1.0 F1.1 F3.0 I3.0 F3.1 I3.1 W3.0 --   I1.0 W3.1 --   I1.1 W1.0 --   W1.1 --   U    U
""",
    ),
]


@pytest.mark.parametrize(("order", "case", "times", "drawing"), FROZEN)
def test_frozen_beyond_the_conditions(order, case, times, drawing):
    form = next(form for form in FORMS if form.order == order)
    assert not (form.fits(case) and form.times(times))
    assert draw(run(lay(order, case), times, update=1)) == drawing.lstrip()


DRAWN = [
    ("interleaved", Case(2, 4, 2), Times(1, 1, 0)),
    ("breadth_first", Case(2, 3, 2), Times(1, 1, 0)),
    ("zb_h1", Case(3, 5, 1), Times(1, 1, 1)),
    ("zb_h2", Case(3, 6, 1), Times(1, 1, 1)),
    ("zb_1p", Case(3, 3, 2), Times(1, 1, 1)),
]


@pytest.mark.parametrize(("order", "case", "times"), DRAWN)
def test_the_drawing_in_the_docstring_is_the_simulators(order, case, times):
    text = getdoc(import_module(f"fourfold.schedule.orders.{order}"))
    assert text is not None
    assert text.split("```")[1].lstrip() == draw(run(lay(order, case), times, update=1))


class Recorder:
    """What torch's schedules ask of a stage: where it lies, and, of those that hold one stage a rank, to run."""

    submod = None
    is_last = False  # so that nothing asks for a loss

    def __init__(self, stage: int, case: Case) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = stage, case.p * case.v, case.p, 0
        self.is_first = stage == 0
        self.ran: list[Piece] = []

    def forward_one_chunk(self, microbatch: int, *given: object, **settings: object) -> None:
        self.ran.append((F, self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **settings: object) -> None:
        self.ran.append((B, self.stage_index, microbatch))

    def perform_reduce_grad(self, scale: int) -> None:
        pass

    def get_fwd_recv_ops(self, microbatch: int) -> list[object]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops


def torch_runs(name: str, case: Case) -> list[list[Piece]]:
    """What a schedule of one stage a rank really runs. (Its list of actions is another: Schedule1F1B's lacks F0.)"""
    ran = []
    for worker in range(case.p):
        stage = Recorder(worker, case)
        schedule = getattr(schedules, name)(stage, case.m, loss_fn=torch.nn.MSELoss())
        schedule._initialize_stage = lambda *given: None  # shapes: there are no tensors
        schedule._step_microbatches([()] * case.m, [{}] * case.m)
        ran.append(stage.ran)
    return ran


def torch_lists(name: str, case: Case) -> list[list[Piece]]:
    """The actions of a schedule of several stages a rank."""
    kinds = {"FORWARD": F, "FULL_BACKWARD": B, "BACKWARD_INPUT": I, "BACKWARD_WEIGHT": W}
    stages = [Recorder(chunk * case.p, case) for chunk in range(case.v)]
    schedule = getattr(schedules, name)(stages, case.m, loss_fn=torch.nn.MSELoss())
    return [
        [(kinds[cell.computation_type.name], cell.stage_index, cell.microbatch_index) for cell in row if cell]
        for _, row in sorted(schedule.pipeline_order.items())
    ]


def lines(program: Program) -> list[list[Piece]]:
    actions = program.actions
    return [
        [(actions[n].kind, actions[n].stage, actions[n].microbatches.start) for n in passes(program, worker)]
        for worker in range(program.workers)
    ]


def ticks(ranks: list[list[Piece]], last: int) -> int:
    """Units of time until all is done: at each, a rank runs its next piece if what that reads was there before."""
    done: set[Piece] = set()
    places, time = [0] * len(ranks), 0
    while len(done) < sum(map(len, ranks)):
        before = frozenset(done)
        for worker, rank in enumerate(ranks):
            place = places[worker]
            if place < len(rank) and before.issuperset(inputs(rank[place], last)):
                done.add(rank[place])
                places[worker] += 1
        assert len(done) > len(before), "deadlock"
        time += 1
    return time


SEVERAL = {
    "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleLoopedBFS": "breadth_first",
    "ScheduleInterleavedZeroBubble": "zb_1p",
}


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", SEVERAL)
def test_orders_and_makespans_are_torchs(name, p, v):
    for case in (Case(p, p, v), Case(p, 2 * p, v), Case(p, 5 * p, v)):
        program, theirs = lay(SEVERAL[name], case), torch_lists(name, case)
        assert lines(program) == theirs
        assert run(program, Times(1, 1, int(name.endswith("ZeroBubble")))).makespan == ticks(theirs, p * v - 1)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (1, 2, 3, 4, 8) for m in (p, p + 1, 3 * p)])
def test_one_stage_a_worker_is_torchs(p, m):
    case = Case(p, m, 1)
    program, theirs = lay("1f1b", case), torch_runs("Schedule1F1B", case)
    assert lines(program) == theirs
    assert run(program, Times(1, 1, 0)).makespan == ticks(theirs, p - 1)
    program, theirs = lay("gpipe", case), torch_runs("ScheduleGPipe", case)
    assert lines(program) == [
        line[:m] + line[: m - 1 : -1] for line in theirs
    ]  # torch's backwards are first in, first out
    assert run(program, Times(1, 1, 0)).makespan == ticks(theirs, p - 1)


@pytest.mark.parametrize(
    ("order", "shape", "message"),
    [
        ("interleaved", Shape(8, 6, 4, 2), "a multiple of 4, found 6; try 8 micro-batches"),
        ("interleaved", Shape(8, 5, 4, 2), "a multiple of 4, found 5; try 4 micro-batches"),
        ("zb_1p", Shape(8, 1, 4, 2), "a multiple of 4, found 1; try 4 micro-batches"),
        ("interleaved", Shape(4, 8, 4, 2), "expected 2 stages on each, 8 in all, found 4; try 8 stages"),
        ("breadth_first", Shape(12, 8, 4, 2), "expected 2 stages on each, 8 in all, found 12"),
        ("zb_h1", Shape(8, 8, 4), "expected 1 stages on each, 4 in all, found 8"),
        ("zb_h2", Shape(2, 8, 4), "expected 1 stages on each, 4 in all, found 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(order, shape, message):
    module = import_module(f"fourfold.schedule.orders.{order}")
    with pytest.raises(ScheduleError) as caught:
        list(module.order(shape, module.Options(shape.microbatches)))
    assert message in str(caught.value)
