"""What an order's actions hand to each other makes the serial gradient, in every copy of a weight."""

from collections import Counter
from math import prod

import pytest

from fourfold.schedule import Action, Program, ScheduleError, Shape, Virtual, bind, drive
from fourfold.schedule.work import B, F, I, W, Work
from schedule.laying import STAGES, lay


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
