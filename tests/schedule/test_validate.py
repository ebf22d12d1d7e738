"""What must not run is refused before anything runs, by name."""

import pytest

from fourfold.schedule import Action, Buffer, Inline, ScheduleError, Shape, Virtual, bind, drive, simulate, validate


def refused(actions, workers, shape=None, **settings):
    with pytest.raises(ScheduleError) as caught:
        validate(bind(actions, workers), shape, **settings)
    return str(caught.value)


def test_deadlock_names_who_waits_for_what(one_forward_one_backward):
    actions = list(one_forward_one_backward(Shape(2, 2)))
    first, second = [a for a in actions if a.worker == 0], [a for a in actions if a.worker == 1]
    first.insert(0, first.pop(2))  # stage 0 wants its backward before its own forwards
    program = bind([*first, *second], 2)
    assert [action.kind for action in first] == ["backward", "forward", "forward", "backward"]
    message = refused([*first, *second], 2)
    assert "the schedule deadlocks after 0 actions" in message
    assert (
        "backward of stage 0, micro-batch 0, worker 0 waits for forward of stage 0, micro-batch 0, worker 0, "
        "and for move of activation-gradient of stage 1, micro-batch 0 from worker 1 to worker 0" in message
    )
    with pytest.raises(ScheduleError, match="deadlocks"):
        drive(program, Virtual(2, lambda action: 1))
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate(program, lambda action: 1)


def test_every_stage_and_microbatch_runs_once(one_forward_one_backward):
    actions = list(one_forward_one_backward(Shape(2, 2)))
    assert "backward of stage 0, micro-batch 1: expected exactly once, found 0 times" in refused(
        actions[:3] + actions[4:], 2
    )
    assert "micro-batch 2: expected exactly once, found 0" in refused(actions, 2, Shape(2, 3))
    assert "forward of stage 2, micro-batch 0: expected exactly once, found 0" in refused(actions, 2, Shape(3, 2))
    assert "runs stage 1, micro-batch" in refused(actions, 2, Shape(1, 2))
    twice = [*actions, Action("forward", 0, range(1), 0)]
    assert "forward of stage 0, micro-batch 0: expected exactly once, found 2" in refused(twice, 2)


def test_a_backward_is_whole_or_both_halves(one_forward_one_backward):
    *others, last = one_forward_one_backward(Shape(1, 1))
    halves = [last._replace(kind="backward input"), last._replace(kind="backward weight", writes=())]
    validate(bind([*others, *halves], 1))
    assert "expected one backward or one of each half" in refused([*others, halves[0]], 1)


def test_buffers_are_written_once_and_read_if_written():
    a = Buffer("activation", 0, 0)
    write = Action("forward", 0, range(1), 0, writes=(a,))
    assert "writes the activation of stage 0, micro-batch 0, which another" in refused([write, write], 1)
    read = Action("backward", 0, range(1), 0, reads=(Buffer("activation", 3, 1),))
    assert "reads the activation of stage 3, micro-batch 1, which no action writes" in refused([write, read], 1)
    new = Action("backward", 0, range(1), 0, reads=(Buffer("weight", 0, version=1),))
    assert "reads the weight of stage 0, version 1, which no action writes" in refused([write, new], 1)
    validate(bind([write, new._replace(reads=(a, Buffer("weight", 0)))], 1))


def test_a_read_after_a_free_and_a_second_free_are_named():
    a = Buffer("activation", 0, 0)
    write = Action("forward", 0, range(1), 0, writes=(a,))
    free = Action("drop", 0, range(1), 0, frees=(a,))
    late = Action("backward", 0, range(1), 0, reads=(a,))
    assert "reads the activation of stage 0, micro-batch 0 after drop" in refused([write, free, late], 1)
    assert "which drop of stage 0, micro-batch 0, worker 0 has freed" in refused([write, late, free, free], 1)
    validate(bind([write, late, free], 1))


def test_a_free_waits_for_readers_on_other_lanes():
    a = Buffer("activation", 0, 0)
    write = Action("forward", 0, range(1), 0, writes=(a,))
    copy = Action("offload", 0, range(1), 0, "host", reads=(a,))
    free = Action("backward", 0, range(1), 0, reads=(a,), frees=(a,))
    program = validate(bind([write, free, copy], 1))
    assert simulate(program, lambda action: 5.0 if action.kind == "offload" else 1.0).makespan == 7.0


def test_memory_budget(one_forward_one_backward):
    shape = Shape(4, 8)
    size = lambda buffer: 10 if buffer.kind == "activation" else 0  # noqa: E731
    validate(bind(one_forward_one_backward(shape), 4), shape, budget=80, size=size)
    assert "worker 0 holds buffers of 40 at once, the budget is 39" in refused(
        one_forward_one_backward(shape), 4, shape, budget=39, size=size
    )


def test_bad_workers_shapes_and_bodies(one_forward_one_backward):
    assert "expected a worker from 0 to 0" in refused(one_forward_one_backward(Shape(2, 2)), 1)
    with pytest.raises(
        ScheduleError, match="microbatches of a schedule: expected a whole number of at least 1, found 0"
    ):
        Shape(microbatches=0)
    program = bind(one_forward_one_backward(Shape(1, 1)), 1)
    with pytest.raises(ScheduleError, match="no body runs backward of stage 0, micro-batch 0, worker 0"):
        drive(program, Inline({"forward": lambda action: None}))


def test_inline_keeps_the_exception_and_names_the_action():
    def fail(action):
        raise KeyError("lost")

    program = bind([Action("forward", 0, range(2, 3), 0)], 1)
    with pytest.raises(KeyError) as caught:
        drive(program, Inline({"forward": fail}))
    assert caught.value.__notes__ == ["during forward of stage 0, micro-batch 2, worker 0"]
