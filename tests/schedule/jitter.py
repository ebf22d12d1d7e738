"""Actions whose times vary, by a law and a seed: the same action of a program takes as long whoever runs it when."""

from collections.abc import Callable
from importlib import import_module
from itertools import accumulate
from random import Random

from fourfold.schedule import Action, Program, Shape, Timeline, bind, validate
from fourfold.schedule.figures import STEPS
from fourfold.schedule.work import B, F, I, W

MEAN = {F: 1.0, B: 2.0, I: 1.0, W: 1.0}
"""Of one stage; moves and updates take none."""


def exponential(seed: int, mean: dict[str, float] = MEAN) -> Callable[[Action], float]:
    """Each action's time is drawn anew, from the exponential law of its kind's mean."""

    def cost(action: Action) -> float:
        if not mean.get(action.kind):
            return 0.0
        place = f"{seed}, {action.kind}, {action.stage}, {action.microbatches.start}, {action.source}"
        return mean[action.kind] * Random(place).expovariate(1.0)

    return cost


def steady(action: Action) -> float:
    return MEAN.get(action.kind, 0.0)


def lay(name: str, p: int, m: int, chunks: int = 1, **options: int) -> Program:
    module, shape = import_module(f"fourfold.schedule.orders.{name}"), Shape(p * chunks, m, p, chunks)
    return validate(bind(module.order(shape, module.Options(m, **options)), p), shape)


def ran(timeline: Timeline, worker: int) -> list[Action]:
    """A worker's forwards, backwards and updates in the sequence in which they started."""
    numbers = [n for n, one in enumerate(timeline.program.actions) if one.worker == worker and one.source is None]
    # What takes no time may start together with what follows it; it ends first.
    numbers.sort(key=lambda n: (timeline.starts[n], timeline.ends[n]))
    return [timeline.program.actions[number] for number in numbers]


def flights(timeline: Timeline) -> list[int]:
    """Per worker, the most passes that were in flight in this run."""
    workers = range(timeline.program.workers)
    return [max(accumulate(STEPS.get(action.kind, 0) for action in ran(timeline, worker))) for worker in workers]
