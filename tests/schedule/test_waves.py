"""Orders with several stages or copies a worker: ZB-V, V-Half, V-Min, Hanayo, Chimera, DualPipe, DualPipeV.

[DES] marks figures that an independent simulator found; "frozen" marks regression values outside of their conditions.
"""

from collections.abc import Iterator
from fractions import Fraction
from importlib import import_module

import pytest
import torch
from torch.distributed.pipelining import schedules

from fourfold.schedule import Program, ScheduleError, Shape
from fourfold.schedule.work import B, F, I, W
from schedule.laying import EVEN, UNEVEN, lay, measure


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
