"""What recipes of tensor grids share: a small GPT in float64, one step of it on a plan, and ranks that hear nobody."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.models import gpt
from fourfold.plan import Plan
from fourfold.training.losses import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import Run, parallelize
from fourfold.training.step import Loss
from fourfold.verify.measure import worst
from fourfold.verify.serial import Serial, Types
from fourfold.wire import World
from fourfold.wire.dry import DryFabric

SHAPE = gpt.Config(vocabulary=64, context=16, layers=2, width=32, heads=4)
ROWS = 8
LENGTH = 8
TOKENS = ROWS * LENGTH
ITEM = 8
"""Bytes of an element."""

OPTIONS = OptimizerOptions(name="sgd", lr=0.1)
DOUBLE = Types(torch.float64, torch.float64, torch.float64)


def model(layers: int = SHAPE.layers) -> gpt.GPT:
    """The GPT with two or three blocks; nobody may change it."""
    return _MODELS[layers]


def batch() -> dict[str, Tensor]:
    """One global batch."""
    return {"tokens": torch.randint(SHAPE.vocabulary, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(7))}


def placed(
    world: World,
    placement: Mapping[str, Any],
    subject: nn.Module | None = None,
    loss: Loss = cross_entropy,
    given: Mapping[str, Tensor] | None = None,
) -> Run:
    """A copy of the model (or of another subject) on a plan, in float64, ready for a step."""
    subject, given = model() if subject is None else subject, batch() if given is None else given
    plan = Plan.of({"placement": {"precision": "fp64", **placement}})
    return parallelize(copy.deepcopy(subject), loss, OPTIONS, plan, world=world, example=given)


def serial(
    subject: nn.Module | None = None, loss: Loss = cross_entropy, given: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The gradients of the same step in one process."""
    subject, given = model() if subject is None else subject, batch() if given is None else given
    return Serial(copy.deepcopy(subject), loss, OPTIONS, seed=1, types=DOUBLE).step(0, given).gradients


def error(run: Run, expected: Mapping[str, Tensor]) -> float:
    """How far the run's gradients are from these: max|a - b| / max|b| of the worst layer."""
    return worst(run.logical_gradients(), expected).error


def deaf(size: int) -> World:
    """The first of so many ranks, which goes on with its own part of each sum: nothing crosses (`wire.dry`)."""
    return World(0, size, "dry", torch.device("cpu"), fabric=DryFabric(0))


def _built(layers: int) -> gpt.GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return gpt.GPT(dataclasses.replace(SHAPE, layers=layers)).double()


_MODELS = {layers: _built(layers) for layers in (2, 3)}
"""Built here: ranks are threads, and would race for torch's generator."""
