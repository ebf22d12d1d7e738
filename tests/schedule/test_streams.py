"""Orders without a flush: their recurrences, weights, staleness, idle time; and the cut between their windows."""

from importlib import import_module
from inspect import getdoc
from random import Random
from typing import NamedTuple

import pytest

from fourfold.schedule import Buffer, Program, ScheduleError, Shape, Virtual, bind, draw, drive, simulate, validate
from fourfold.schedule.action import PREDICT, PREDICTED, UPDATE, WEIGHT
from fourfold.schedule.budget import Budget
from fourfold.schedule.figures import held
from fourfold.schedule.ready import Mode, drive_ready
from fourfold.schedule.window import Stream
from fourfold.schedule.work import B, F
from schedule import recurrences
from schedule.jitter import exponential
from schedule.recurrences import RATE, SMOOTH, History, Reading, Scalars, recurrence


def clamped(version: int) -> int:
    """Before the first update there is but one weight."""
    return max(0, version)


def both(weights: list[float]) -> tuple[list[float], list[float]]:
    """Forward and backward take the same."""
    return weights, weights


def stale(p: int) -> Reading:
    """PipeDream: w_{t+1} = w_t - lr grad f(w_1^{t-p+1}, ..., w_p^t)."""
    return lambda w, v, t: both([w[s][clamped(t - (p - 1 - s))] for s in range(p)])


def vertical(p: int) -> Reading:
    """PipeDream with vertical sync: w_{t+1} = w_t - lr grad f(w^{t-p+1})."""
    return lambda w, v, t: both([one[clamped(t - p + 1)] for one in w])


def one_late(m: int) -> Reading:
    """2BW: w_{t+1} = w_t - lr grad f(w_{t-1})."""
    return lambda w, v, k: both([one[clamped(k // m - 1)] for one in w])


def predicted(p: int) -> Reading:
    """SpecTrain, stage s counted from 0: s // 2 + p - s - 1 updates ahead in a forward, s // 2 in a backward."""

    def reading(w: History, v: History, t: int) -> tuple[list[float], list[float]]:
        forward, backward = [], []
        for s in range(p):
            then = clamped(t - (p - 1 - s))
            forward.append(w[s][then] - (s // 2 + p - s - 1) * RATE * v[s][then])
            backward.append(w[s][t] - s // 2 * RATE * v[s][t])
        return forward, backward

    return reading


class Case(NamedTuple):
    """An order, its settings, what it stands for, and how many weights stage s of p keeps."""

    name: str
    m: int
    options: dict
    reading: Reading
    kept: list[int]
    momentum: float = 0.0


def cases(p: int) -> dict[str, Case]:
    return {
        "pipedream": Case("pipedream", 1, {}, stale(p), [p - s for s in range(p)]),
        "pipedream vertical": Case("pipedream", 1, {"vertical": True}, vertical(p), [p] * p),
        "2bw, m = p": Case("pipedream_2bw", p, {}, one_late(p), [2] * p),
        "2bw, m = p + 3": Case("pipedream_2bw", p + 3, {}, one_late(p + 3), [2] * p),
        "spectrain": Case("spectrain", 1, {}, predicted(p), [1] * p, SMOOTH),
    }


NAMES = tuple(cases(2))


def stream(case: Case, p: int, updates: int = 1) -> Stream:
    module = import_module(f"fourfold.schedule.orders.{case.name}")
    return module.stream(Shape(p, updates * case.m, p), module.Options(case.m, **case.options))


def whole(case: Case, p: int, updates: int) -> Program:
    module, shape = import_module(f"fourfold.schedule.orders.{case.name}"), Shape(p, updates * case.m, p)
    return validate(bind(module.order(shape, module.Options(case.m, **case.options)), p), shape)


def close(found: History, want: History) -> bool:
    return all(
        abs(mine - other) <= 1e-12 * max(map(abs, theirs))
        for mine_all, theirs in zip(found, want, strict=True)
        for mine, other in zip(mine_all, theirs, strict=True)
    )


# ---- what they stand for


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_that_of_the_recurrence(name, p):
    case, updates = cases(p)[name], 12
    program = whole(case, p, updates)
    machine = Scalars(program, case.momentum)
    drive(program, machine)
    assert close(machine.made, recurrence(p, case.m, updates, case.reading, case.momentum))
    if p > 1:
        synchronous = recurrence(p, case.m, updates, lambda w, v, k: both([one[k // case.m] for one in w]))
        assert not close(machine.made, synchronous)


@pytest.mark.parametrize("name", NAMES)
def test_whatever_comes_when_the_numbers_are_the_same(name):
    case, p = cases(4)[name], 4
    program = whole(case, p, 9)
    strict = Scalars(program, case.momentum)
    drive(program, strict)
    for seed in range(5):
        cost = exponential(seed, {F: 1.0, B: 2.0, "move": 0.5, UPDATE: 0.3, PREDICT: 0.1})
        for budget in (held(program), [most + 2 for most in held(program)]):
            machine = Scalars(program, case.momentum, cost)
            drive_ready(program, machine, Mode(Budget(budget)))
            assert machine.made == strict.made


@pytest.mark.parametrize("p", [2, 3, 4, 5])
@pytest.mark.parametrize("name", NAMES)
def test_how_many_weights_each_stage_keeps(name, p):
    case = cases(p)[name]
    program = whole(case, p, 3 * p)
    machine = Scalars(program, case.momentum)
    drive(program, machine)
    assert machine.versions == case.kept
    assert len(machine.values) == p, "one weight a stage is left"


@pytest.mark.parametrize("p", [2, 3, 4, 5])
@pytest.mark.parametrize("name", NAMES)
def test_updates_between_a_forward_and_its_backward(name, p):
    """PipeDream and SpecTrain p - 1 - s on stage s; 2BW at most one, its gradient's delay being one on every stage."""
    case, updates = cases(p)[name], 3 * p
    program = whole(case, p, updates)
    for s in range(p):
        line = [action for action in program.actions if action.worker == s and action.source is None]
        places = {(one.kind, one.microbatches.start): place for place, one in enumerate(line)}
        for k in range(p * case.m, updates * case.m):
            between = line[places[F, k] : places[B, k]]
            found = sum(action.kind == UPDATE for action in between)
            assert found <= 1 if case.name == "pipedream_2bw" else found == p - 1 - s
            if case.name != "spectrain":
                assert line[places[F, k]].reads[0] == line[places[B, k]].reads[0], "both passes see one version"
            if case.name == "pipedream_2bw":
                assert k // case.m - line[places[F, k]].reads[0].version == 1


@pytest.mark.parametrize("times", [(1.0, 1.0), (1.0, 2.0), (2.0, 1.0)])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_full_pipeline_never_idles(name, p, times):
    case, updates = cases(p)[name], 4 * p
    program = whole(case, p, updates)
    cost: dict[str, float] = dict(zip((F, B), times, strict=True))
    timeline = simulate(program, lambda action: cost.get(action.kind, 0.0))
    for worker in range(p):
        ran = sorted(
            (start, end) for action, start, end in timeline if action.worker == worker and action.kind in (F, B)
        )
        # From the first update of every stage to the last forward of any.
        begin = max(
            end for action, _, end in timeline if action.kind == UPDATE and action.microbatches.start == p * case.m
        )
        end = min(
            end for action, _, end in timeline if action.kind == F and action.microbatches.start == updates * case.m - 1
        )
        inside = [(one, other) for one, other in zip(ran, ran[1:], strict=False) if one[0] >= begin and other[1] <= end]
        assert inside
        assert all(one[1] == other[0] for one, other in inside)


@pytest.mark.parametrize("times", [(1, 1), (1, 2), (2, 1), (3, 5)])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_where_a_prediction_aims(p, times):
    """[DES] Stage k makes k t_b // (t_f + t_b) updates between a micro-batch's own and that of the first stage."""
    t, (forward, backward) = 3 * p, times
    program = whole(cases(p)["spectrain"], p, 6 * p)
    timeline = simulate(program, lambda one: {F: forward, B: backward}.get(one.kind, 0))
    updates = {(one.stage, one.microbatches.start): start for one, start, _ in timeline if one.kind == UPDATE}
    for k in range(p):
        mine = [start for (stage, _), start in updates.items() if stage == k]
        travelled = sum(updates[k, t] < start <= updates[0, t] for start in mine)
        assert travelled == k * backward // (forward + backward)
    guesses = {
        one.stage: one.writes[0].version for one in program.actions if one.kind == PREDICT and one.microbatches[0] == t
    }
    assert guesses == {k: t + k // 2 for k in range(p) if k // 2 or k < p - 1}


@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_prediction_is_nearer_than_the_weight_that_it_is_made_from(p, monkeypatch):
    """Of one loss all along, so that what differs from guess to guess is the weights' own way; in 9 of 10 forwards."""
    monkeypatch.setattr(recurrences, "given", lambda microbatch: 1.0)
    monkeypatch.setattr(recurrences, "target", lambda microbatch: 0.1)
    program = whole(cases(p)["spectrain"], p, 60)
    machine = Scalars(program, SMOOTH)
    drive(program, machine)
    nearer = []
    for action in program.actions:
        guess = action.writes[0]
        if (action.kind, guess.kind) == (PREDICT, PREDICTED[F]) and guess.version < 60:
            weights, now = machine.made[action.stage], action.reads[0].version
            ahead = (guess.version - now) * RATE * machine.speeds[action.stage][now]
            nearer.append(
                abs(weights[now] - ahead - weights[guess.version]) < abs(weights[now] - weights[guess.version])
            )
    print(f"p = {p}: {sum(nearer)} of {len(nearer)} guesses nearer")
    assert sum(nearer) >= 0.9 * len(nearer) > 0


# ---- windows


def cuts(updates: int, seed: int | None, longest_last: int) -> list[int]:
    """Where windows begin and end: after every update, or at random; the last is long enough to drain."""
    if seed is None:
        return [*range(updates - longest_last + 1), updates]
    draw_from, found = Random(seed), [0]
    while found[-1] < updates - longest_last:
        found.append(min(found[-1] + draw_from.randrange(1, 4), updates - longest_last))
    return [*found, updates]


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_window_after_window_is_the_whole(name, p, seed):
    """The same numbers to the bit, each window from just what it says is given to just what it says is kept."""
    case, updates = cases(p)[name], 12
    program = whole(case, p, updates)
    straight = Scalars(program, case.momentum)
    drive(program, straight)
    line, ends = stream(case, p), cuts(updates, seed, -(-p // case.m))
    machine, ran = Scalars(program, case.momentum), []
    for begin, end in zip(ends, ends[1:], strict=False):
        window = line.window(begin, end, last=end == updates)
        assert set(machine.values) == set(window.given.items())
        machine.first = begin * case.m
        for action, _, _ in drive(window.program(p), machine):
            if action.source is None:
                ran.append((action.worker, action.kind, action.microbatches.start + begin * case.m))
        assert set(machine.values) == set(window.kept.items())
        machine.values = {(window.handed[one], worker): value for (one, worker), value in machine.values.items()}
    assert machine.made == straight.made
    for worker in range(p):
        listed = [one for one in program.actions if one.worker == worker and one.source is None]
        assert [(kind, k) for who, kind, k in ran if who == worker] == [(a.kind, a.microbatches.start) for a in listed]


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_windows_of_a_full_pipeline_are_one_program(name, p):
    line = stream(cases(p)[name], p)
    first = line.window(line.settled, line.settled + 2)
    assert first == line.window(line.settled + 5, line.settled + 7)
    assert set(first.handed.values()) == set(first.given)


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_keeps_stashes_weights_and_one_activation(name):
    p, case = 4, cases(4)[name]
    window = stream(case, p).window(20, 21)
    for s in range(p):
        mine = [buffer for buffer, worker in window.given.items() if worker == s]
        assert all(buffer.stage == s for buffer in mine)
        kinds = [buffer.kind for buffer in mine]
        assert (kinds.count("stash"), kinds.count("activation")) == (p - s, int(s < p - 1))
        assert kinds.count(WEIGHT) == case.kept[s]
        assert Buffer(WEIGHT, s) in mine


def test_a_drained_pipeline_may_begin_again():
    """Twice from empty to empty: the second run's first version is the first run's last."""
    case, p = cases(3)["pipedream"], 3
    line = stream(case, p)
    machine = Scalars(whole(case, p, 6))
    for first in (0, 6):
        window = line.window(0, 6, last=True)
        assert set(machine.values) == set(window.given.items())
        machine.first = first
        drive(window.program(p), machine)
        machine.values = {(window.handed[one], worker): value for (one, worker), value in machine.values.items()}
    reading = lambda w, v, t: both([w[s][t // 6 * 6 + clamped(t % 6 - 2 + s)] for s in range(p)])  # noqa: E731
    assert close(machine.made, recurrence(p, 1, 12, reading))


# ---- drawings and refusals


@pytest.mark.parametrize(
    ("name", "m", "microbatches"), [("pipedream", 1, 6), ("pipedream_2bw", 3, 9), ("spectrain", 1, 6)]
)
def test_the_drawing_in_the_docstring(name, m, microbatches):
    module, shape = import_module(f"fourfold.schedule.orders.{name}"), Shape(3, microbatches, 3)
    program = bind(module.order(shape, module.Options(m)), 3)
    assert draw(simulate(program, lambda one: float(one.kind in (F, B, UPDATE)))) in (getdoc(module) or "")


def test_bad_shapes_are_refused():
    module = import_module("fourfold.schedule.orders.pipedream")
    with pytest.raises(ScheduleError, match="after every 4 micro-batches: expected a multiple of them, found 6; try 4"):
        list(module.order(Shape(2, 6, 2), module.Options(4)))
    with pytest.raises(ScheduleError, match="pipedream on 2 workers: expected 1 stages on each, 2 in all, found 4"):
        list(module.order(Shape(4, 4, 2), module.Options(1)))
    module = import_module("fourfold.schedule.orders.pipedream_2bw")
    with pytest.raises(ScheduleError, match="at least 4 micro-batches an update, found 3; try 4, or pipedream"):
        list(module.order(Shape(4, 3, 4), module.Options(3)))
    line = stream(cases(4)["pipedream"], 4)
    with pytest.raises(
        ScheduleError, match="at update 5 with 4 micro-batches in flight and drains them: .* 9, found 8"
    ):
        line.window(5, 8, last=True)
    with pytest.raises(ScheduleError, match="begins at update 5 with 4 micro-batches in flight: .* 6, found 5"):
        line.window(5, 5)


def test_a_window_that_is_not_given_what_it_reads_is_refused():
    window = stream(cases(3)["pipedream"], 3).window(6, 7)
    lacking = {buffer: worker for buffer, worker in window.given.items() if buffer.kind != "stash"}
    with pytest.raises(ScheduleError, match="reads the stash of stage 0, micro-batch 0, which no action writes"):
        bind(window.actions, 3, lacking)
    with pytest.raises(ScheduleError, match="deadlocks"):
        drive(bind(window.actions[::-1], 3, window.given), Virtual(3, lambda action: 1.0))
