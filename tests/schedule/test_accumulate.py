from fourfold.plan import Technique
from fourfold.schedule import Buffer, Inline, Shape, bind, draw, drive, simulate, validate
from fourfold.schedule.orders.accumulate import Options, order


def cost(action):
    return {"forward": 1.0, "backward": 2.0}.get(action.kind, 1.0)


def test_drawing():
    shape = Shape(microbatches=3)
    program = validate(bind(order(shape, Options(3)), workers=1), shape)
    assert draw(simulate(program, cost)) == "0 | F0 B0 -- F1 B1 -- F2 B2 -- U\n"


def test_several_stages_on_one_worker():
    shape = Shape(stages=2, microbatches=2)
    program = validate(bind(order(shape, Options(2)), workers=1), shape)
    assert draw(simulate(program, lambda action: 1)) == "0 | F0.0 F1.0 B1.0 B0.0 F0.1 F1.1 B1.1 B0.1 U    U\n"


def test_activations_of_one_microbatch_live_at_a_time():
    program = bind(order(Shape(microbatches=5), Options(5)), workers=1)
    timeline = simulate(program, cost)
    assert timeline.peaks(lambda buffer: int(buffer.kind == "stash")) == {0: 1}
    assert timeline.peaks(lambda buffer: int(buffer.kind == "gradient")) == {0: 5}


def test_inline_runs_bodies_in_the_sequence_of_the_program():
    ran = []
    bodies = {
        "forward": lambda action: ran.append(f"F{action.microbatches.start}"),
        "backward": lambda action: ran.append(f"B{action.microbatches.start}"),
        "update": lambda action: ran.append(
            f"U{[buffer.microbatch for buffer in action.reads if buffer.kind == 'gradient']}"
        ),
    }
    program = validate(bind(order(Shape(microbatches=3), Options(3)), workers=1))
    drive(program, Inline(bodies))
    timeline = drive(program, Inline(bodies))  # a program is reusable: nothing of a step is left in it
    assert ran == ["F0", "B0", "F1", "B1", "F2", "B2", "U[0, 1, 2]"] * 2
    assert [span.name for span in timeline.spans()] == ["forward", "backward"] * 3 + ["update"]
    assert all(start <= end for _, start, end in timeline)


def test_is_found_by_name():
    technique = Technique.find("schedule", "accumulate", {"microbatches": 4})
    assert technique.options == Options(4) and technique.module.order is order


def test_update_replaces_the_weights():
    program = bind(order(Shape(microbatches=2), Options(2)), workers=1)
    assert Buffer("weight", 0, version=1) in program.actions[-1].writes
    assert set(program.before[-1]) == {0, 1, 2, 3}  # every reader of the old weights comes first
