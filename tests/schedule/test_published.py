"""The comparison of RoundPipe's artifact: four orders on five models, 8 GPUs, 16 micro-batches, from our own simulator.

The published rule recomputes a stage only once its gradient is there; given early recompute, as RoundPipe itself is,
the baselines idle less ([DES]: an independent simulator found it).
"""

from collections.abc import Callable
from importlib import import_module

import pytest

from fourfold.recipes._consumer import DEVICES, MICROBATCHES, MODELS, Timed
from fourfold.schedule import Action, Shape, Timeline, bind, simulate, validate
from fourfold.schedule.figures import bubble
from fourfold.schedule.recompute import recomputed

PUBLISHED = {
    "gpipe": (36.13, 42.08, 41.73, 34.88, 31.18),
    "1f1b": (35.19, 42.08, 41.73, 34.88, 31.21),
    "interleaved": (27.75, 30.64, 30.94, 15.15, 5.96),
    "breadth_first": (25.01, 29.20, 30.39, 13.68, 4.39),
}
"""Bubble, in percent."""
EARLY = {
    "1f1b": (30.49, 38.55, 39.15, 30.28, 23.28),
    "interleaved": (21.66, 28.69, 29.48, 13.48, 4.32),
    "breadth_first": (22.20, 27.93, 29.20, 12.73, 3.53),
}
BEST = {False: (2467.3, 7385.6, 8999.3, 25927.6, 28578.9), True: (2361.5, 7256.1, 8847.7, 25643.6, 28320.8)}
"""Milliseconds of the best of the four, by the published rule and with early recompute."""


def cut_of(model: Timed, order: str) -> tuple[int, ...]:
    return model.wide if order in ("gpipe", "1f1b") else model.narrow


def run(model: Timed, order: str, early: bool, cost: Callable[[Action], float] | None = None) -> Timeline:
    cut = cut_of(model, order)
    shape = Shape(len(cut), MICROBATCHES, DEVICES, len(cut) // DEVICES)
    module = import_module(f"fourfold.schedule.orders.{order}")
    actions = recomputed(module.order(shape, module.Options(MICROBATCHES)), range(shape.stages), early=early)
    return simulate(validate(bind(actions, DEVICES), shape), cost or model.cost(cut))


ROWS = [
    pytest.param(order, name, early, percent, id=f"{order}-{name}-{'early' if early else 'published'}")
    for early, table in ((False, PUBLISHED), (True, EARLY))
    for order, row in table.items()
    for name, percent in zip(MODELS, row, strict=True)
]


@pytest.mark.parametrize(("order", "name", "early", "percent"), ROWS)
def test_bubbles_are_the_published_ones(order, name, early, percent):
    assert 100 * bubble(run(MODELS[name], order, early)) == pytest.approx(percent, abs=0.02)


@pytest.mark.parametrize("early", [False, True], ids=["published", "early"])
def test_the_best_makespan_is_the_published_one(early):
    found = [min(run(model, order, early).makespan for order in PUBLISHED) for model in MODELS.values()]
    assert found == pytest.approx(BEST[early], abs=0.06)


def test_the_head_is_not_recomputed():
    model = MODELS["1.7B"]
    usual = model.cost(model.wide)
    last = len(model.wide) - 1

    def cost(action: Action) -> float:
        again = action.kind == "recompute" and action.stage == last
        return usual(action) + (model.head_forward if again else 0)

    assert 100 * bubble(run(model, "1f1b", False, cost)) == pytest.approx(40.95, abs=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_in_one_stage(name):
    model = MODELS[name]
    assert sum(model.wide) == sum(model.narrow) == model.layers
    assert len(model.wide) == DEVICES and not len(model.narrow) % DEVICES
