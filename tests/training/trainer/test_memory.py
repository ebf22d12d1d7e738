"""Measured memory: what rests is counted to the byte, the peak is that of one real step."""

import pytest
import torch

from fourfold.anatomy import deferred
from fourfold.models.gpt import GPT, Config
from fourfold.training import memory
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import Run, parallelize
from fourfold.training.values import Drawn
from fourfold.wire import World, join, threads

CONFIG = Config(vocabulary=64, context=16, layers=2, width=32, heads=2)
BATCH = {"tokens": torch.arange(4 * 17).view(4, 17) % 64}
SLACK = 4096
"""Bytes of padding, step counters and small scalars."""


def placed(world: World, settings: dict) -> Run:
    model = deferred(lambda: GPT(CONFIG))
    weights = Drawn(model, seed=1)
    run = parallelize(model, cross_entropy, OptimizerOptions(lr=1e-3), settings, world=world, weights=weights)
    run.step(BATCH)
    return run


def elements() -> int:
    return sum(parameter.numel() for parameter in GPT(CONFIG).parameters())


def test_at_rest_one_rank_holds_weights_once_gradients_once_and_two_moments():
    found = memory.at_rest(placed(join(), {}))
    assert found == pytest.approx(
        {"parameters": 4 * elements(), "gradients": 4 * elements(), "optimizer": 8 * elements()}, abs=SLACK
    )


def test_at_rest_shards_are_halves_and_whole_weights_rest_beside_them_at_level_optimizer():
    for level, whole in (("parameters", 0), ("optimizer", 4 * elements())):
        runs = threads.launch(2, lambda world, level=level: rest(world, level))
        for found in runs:
            half = 4 * elements() / 2
            assert found == pytest.approx(
                {"parameters": half + whole, "gradients": half, "optimizer": 2 * half}, abs=SLACK
            )


def rest(world: World, level: str) -> dict[str, int]:
    return memory.at_rest(placed(world, {"placement": {"z": 2, "shard": level}}))


def test_a_measured_step_is_the_step_itself_and_its_peak_lies_above_what_rests():
    run, other = placed(join(), {}), placed(join(), {})
    result = memory.measure(run, lambda: run.step(BATCH))
    assert (result.step, result.loss) == (1, other.step(BATCH).loss)
    resting = memory.at_rest(run)
    assert {category: run.ledger.memory[category] for category in resting} == resting
    logits = 4 * 16 * 64 * 4
    assert run.ledger.notes[memory.PEAK] > sum(resting.values()) + logits


def test_thread_ranks_share_an_allocator_and_are_not_measured():
    assert memory.measurable(placed(join(), {}))
    assert threads.launch(2, lambda world: memory.measurable(placed(world, {"placement": {"data": 2}}))) == [
        False,
        False,
    ]
