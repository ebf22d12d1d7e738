"""Three blocks stand for many, two row counts for all: both exactly."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from fourfold.models.gpt import GPT, Config
from fourfold.planner import Subject, Traces
from fourfold.planner.blocks import Image, shorten
from fourfold.planner.memory import plain
from fourfold.planner.tape import MismatchError, Tape, blend
from fourfold.planner.trace import Settings, record
from fourfold.training.losses.cross_entropy import cross_entropy

TOKENS = torch.zeros(2, 16, dtype=torch.int64)
SUBJECT = Subject(
    lambda: GPT(Config(vocabulary=64, context=16, layers=6, width=16, heads=2, dropout=0.1)),
    cross_entropy,
    {"tokens": TOKENS, "targets": TOKENS},
    6,
)


@pytest.fixture(scope="module")
def traces() -> Traces:
    return Traces(SUBJECT)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_short_tape_unrolls_to_the_whole_one(traces, recompute):
    settings = Settings(2, recompute=recompute)
    short, whole = (
        Tape(record(SUBJECT, traces.anatomy, traces.outline["inputs"], dataclasses.replace(settings, short=short)))
        for short in (True, False)
    )
    assert short.blocks == whole.blocks
    assert [(one.phase, one.place) for one in short.segments] == [(one.phase, one.place) for one in whole.segments]
    levels = [plain(tape, [0] * len(tape.operators), states=2, itemsize=4) for tape in (short, whole)]
    assert levels[0].highest == levels[1].highest
    assert levels[0].level == levels[1].level
    assert levels[0].peak == levels[1].peak


def test_two_row_counts_give_a_third_exactly(traces):
    exact = record(SUBJECT, traces.anatomy, traces.outline["inputs"], Settings(7))
    two, three = traces.pair(Settings(7))
    assert blend(two, three, (2, 3), 7) == exact


def test_fake_and_real_tensors_give_one_tape(traces):
    fake, real = (
        Tape(record(SUBJECT, traces.anatomy, traces.outline["inputs"], Settings(2, streams=False, real=real)))
        for real in (False, True)
    )
    assert [segment.events for segment in fake.segments] == [segment.events for segment in real.segments]
    assert fake.storages == real.storages


def test_every_gradient_is_found(traces):
    tape = traces.tape(Settings(2))
    found = sum(storage.nbytes for storage in tape.storages.values() if storage.gradient_of is not None)
    weights = sum(4 * torch.Size(shape).numel() for _, shape, trained in tape.weights if trained)
    assert found == weights


@pytest.mark.parametrize(
    ("first", "second"), [("a", "b"), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (1, "1"), (True, False), (None, 1)]
)
def test_different_structures_do_not_blend(first, second):
    with pytest.raises(MismatchError):
        blend(first, second, (2, 3), 4)


def test_what_does_not_grow_stays_and_what_grows_is_affine():
    assert blend({"a": [10, 4], "b": 0.5}, {"a": [13, 4], "b": 0.25}, (2, 3), 6) == {"a": [22, 4], "b": 0.5}


class Two(nn.Module):
    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=kind == "b") for kind in kinds)


def test_only_equal_neighbours_stand_for_one_another():
    model = Two("aaaaabaa")
    images = shorten(model, [f"layers.{number}" for number in range(8)], {})
    assert [image.stands_for for image in images] == [
        ("layers.0",),
        ("layers.1", "layers.2", "layers.3"),
        ("layers.4",),
        ("layers.5",),
        ("layers.6",),
        ("layers.7",),
    ]
    assert len(model.layers) == 6
    assert [layer.bias is not None for layer in model.layers] == [False, False, False, True, False, False]


def test_blocks_on_different_inputs_are_not_equal():
    inputs = {f"layers.{number}": "small" if number < 4 else "large" for number in range(8)}
    images = shorten(Two("aaaaaaaa"), [f"layers.{number}" for number in range(8)], inputs)
    assert [len(image.stands_for) for image in images] == [1, 2, 1, 1, 2, 1]


def test_a_sequence_is_not_shortened():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    assert shorten(model, list("01234"), {}) == [Image(name, (name,)) for name in "01234"]
