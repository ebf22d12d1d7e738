"""One forward, one backward, as the example of a pipeline order: closed forms, drawings, memory, machines."""

import threading
from random import Random

import pytest

from fourfold.schedule import Action, Buffer, Lane, Shape, Threads, Virtual, bind, draw, drive, simulate, validate

GRID = [(p, m, tf, tb) for p in (1, 2, 3, 4, 8) for m in (1, 4, 8, 16) for tf, tb in ((1, 1), (1, 2), (3, 2))]


def by_kind(forward, backward, move=0.0):
    return lambda action: {"forward": forward, "backward": backward, "move": move}[action.kind]


@pytest.mark.parametrize(("p", "m", "tf", "tb"), [case for case in GRID if case[1] >= case[0]])
def test_makespan_is_the_closed_form(one_forward_one_backward, p, m, tf, tb):
    # (m + p - 1)(t_f + t_b): PipeDream-flush / DAPPLE, with free transfers
    shape = Shape(stages=p, microbatches=m, workers=p)
    program = validate(bind(one_forward_one_backward(shape), p), shape)
    assert simulate(program, by_kind(tf, tb)).makespan == (m + p - 1) * (tf + tb)


def test_staircase(one_forward_one_backward):
    program = bind(one_forward_one_backward(Shape(4, 6)), 4)
    assert draw(simulate(program, by_kind(1, 1))) == (
        "0 | F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5\n"
        "1 | .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .\n"
        "2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .\n"
        "3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .\n"
    )


def test_staircase_with_longer_backward(one_forward_one_backward):
    program = bind(one_forward_one_backward(Shape(2, 3)), 2)
    assert draw(simulate(program, by_kind(1, 2))) == (
        "0 | F0 F1 .  .  B0 -- F2 B1 -- .  B2 --\n1 | .  F0 B0 -- F1 B1 -- F2 B2 -- .  .\n"
    )


def test_round_robin_over_stateless_workers(round_robin):
    program = validate(bind(round_robin(Shape(2, 2)), 3), Shape(2, 2))
    assert draw(simulate(program, by_kind(1, 1))) == ("0 | F0 F1 .  B0 B1\n1 | .  F0 F1 .  .\n2 | .  .  B0 B1 .\n")
    assert (
        sum(action.kind == "move" for action in program.actions) == 2 * 3
    )  # act 0 → 1, act 1 → 2, grad 1 → 0; act 0 stays


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 3)])
def test_activations_in_flight_are_the_published_count(one_forward_one_backward, p, m):
    # stage i of p holds min(m, p - i) micro-batches (Megatron, arXiv 2104.04473)
    timeline = simulate(bind(one_forward_one_backward(Shape(p, m)), p), by_kind(1, 2))
    for stage in range(p):
        own = timeline.peaks(lambda buffer, stage=stage: int(buffer.kind == "activation" and buffer.stage == stage))
        assert own[stage] == min(m, p - stage)


def test_nothing_is_held_after_the_last_action(one_forward_one_backward):
    program = bind(one_forward_one_backward(Shape(4, 8)), 4)
    assert all(life.users for life in program.lives)


def test_a_move_that_an_order_makes_frees_what_it_took():
    # worker 0 parks a stash with worker 1 and takes it back: BPipe's evict and load
    stash, parked, back = (Buffer("stash", 0, 0, version) for version in range(3))
    forward = Action("forward", 0, range(1), 0, writes=(stash,))
    evict = Action("move", 0, range(1), 1, "link", (stash,), (parked,), (stash,), source=0)
    load = Action("move", 0, range(1), 0, "link", (parked,), (back,), (parked,), source=1)
    backward = Action("backward", 0, range(1), 0, reads=(back,), frees=(back,))
    program = validate(bind([forward, evict, load, backward], 2), Shape())
    assert program.actions == (forward, evict, load, backward)
    assert set(program.lanes) == {Lane(0, "compute"), Lane(0, "link 1"), Lane(1, "link 0")}
    timeline = simulate(program, lambda action: 1.0)
    assert timeline.memory(lambda buffer: 1) == {0: [(0, 1), (2, 0), (2, 1), (4, 0)], 1: [(1, 1), (3, 0)]}


def test_a_rank_counts_what_it_holds(one_forward_one_backward):
    # alone, nothing delays what comes in: the last rank has its four activations long before it reads them
    program = bind(one_forward_one_backward(Shape(3, 4)), 3)
    size = lambda buffer: int(buffer.kind == "activation")  # noqa: E731
    found = [drive(program, Rank(worker, by_kind(1, 1, 1))).peaks(size) for worker in range(3)]
    assert [peaks[worker] for worker, peaks in enumerate(found)] == [3, 4, 4]
    assert found[0][2] == found[2][0] == 0  # it knows nothing of a worker that it never meets


@pytest.mark.parametrize("seed", range(5))
def test_simulate_is_drive_in_virtual_time(one_forward_one_backward, round_robin, seed):
    random = Random(seed)
    for order, shape, workers in ((one_forward_one_backward, Shape(4, 7), 4), (round_robin, Shape(5, 3), 3)):
        program = bind(order(shape), workers)
        costs = {id(action): random.expovariate(1.0) for action in program.actions}
        cost = lambda action, costs=costs: costs[id(action)]  # noqa: E731
        fast, slow = simulate(program, cost), drive(program, Virtual(workers, cost))
        assert fast.starts == slow.starts and fast.ends == slow.ends


def test_ties_are_broken_in_the_sequence_of_issue(one_forward_one_backward):
    program = bind(one_forward_one_backward(Shape(3, 4)), 3)
    machine = Virtual(3, by_kind(1, 1))
    order = []
    original = machine.next
    machine.next = lambda: (order.append((found := original()).action), found)[1]  # type: ignore[method-assign]
    drive(program, machine)
    first = list(order)
    order.clear()
    machine = Virtual(3, by_kind(1, 1))
    original = machine.next
    machine.next = lambda: (order.append((found := original()).action), found)[1]  # type: ignore[method-assign]
    drive(program, machine)
    assert order == first


def test_threads_run_the_same_program(one_forward_one_backward, round_robin):
    others = set(threading.enumerate())
    for order, shape, workers in ((one_forward_one_backward, Shape(3, 4), 3), (round_robin, Shape(4, 3), 2)):
        lock, ran = threading.Lock(), []

        def body(action, ran=ran, lock=lock):
            with lock:
                ran.append(action)

        program = validate(bind(order(shape), workers), shape)
        with Threads(workers, {"forward": body, "backward": body, "move": body}) as machine:
            timeline = drive(program, machine)
        assert set(ran) == set(program.actions) and len(ran) == len(program.actions)
        number = {action: place for place, action in enumerate(ran)}
        for action, before in zip(program.actions, program.before, strict=True):
            assert all(number[program.actions[other]] < number[action] for other in before)
        assert timeline.makespan > 0 and set(threading.enumerate()) <= others


def test_an_exception_in_a_thread_names_the_action(one_forward_one_backward):
    others = set(threading.enumerate())

    def body(action):
        if action.stage == 1 and action.microbatches.start == 2:
            raise ArithmeticError("overflow")

    program = bind(one_forward_one_backward(Shape(2, 4)), 2)
    with Threads(2, {"forward": body, "backward": body}) as machine, pytest.raises(ArithmeticError) as caught:
        drive(program, machine)
    assert caught.value.__notes__ == ["during forward of stage 1, micro-batch 2, worker 1"]
    assert set(threading.enumerate()) <= others


class Rank(Virtual):
    """One worker's share: its end of every move."""

    def __init__(self, worker, cost):
        super().__init__(1, cost)
        self.owns = (worker,)


def test_a_rank_drives_its_share_and_its_end_of_every_move(one_forward_one_backward):
    program = bind(one_forward_one_backward(Shape(3, 4)), 3)
    for worker in range(3):
        ran = [action for action, _, _ in drive(program, Rank(worker, by_kind(1, 1, 1)))]
        assert ran == [action for action in program.actions if worker in (action.worker, action.source)]
