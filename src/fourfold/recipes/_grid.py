"""What recipes of tensor grids share: a small GPT in float64, one step of it on a plan, and ranks that hear nobody."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
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
from fourfold.verify.serial import Serial, SerialStep, Types
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
) -> SerialStep:
    """The same step in one process."""
    subject, given = model() if subject is None else subject, batch() if given is None else given
    return Serial(copy.deepcopy(subject), loss, OPTIONS, seed=1, types=DOUBLE).step(0, given)


def error(run: Run, expected: Mapping[str, Tensor]) -> float:
    """How far the run's gradients are from these: max|a - b| / max|b| of the worst layer."""
    return worst(run.logical_gradients(), expected).error


def alone() -> World:
    """One rank."""
    return World(0, 1, "alone", torch.device("cpu"))


def deaf(size: int) -> World:
    """The first of so many ranks, which goes on with its own part of each sum: nothing crosses (`wire.dry`)."""
    return World(0, size, "dry", torch.device("cpu"), fabric=DryFabric(0))


# ---- what lies on a rank

Sizes = dict[tuple[str, str], int]
"""(path of a module, or a weight's name, in a block; "input", "output" or "weight"): elements."""


def watch(run: Run) -> Sizes:
    """What the rank stores of the blocks' weights between steps; a step adds their modules' inputs and outputs."""
    slots = [slot for unit in run.placed.units for slot in unit.arena.layout.slots]
    sizes: Sizes = {(slot.name, "weight"): slot.used for slot in slots if slot.name.startswith(WITHIN)}

    def hooked(path: str, module: nn.Module) -> None:
        def hook(_: nn.Module, read: tuple[Tensor, ...], out: Tensor) -> None:
            sizes[path, "input"], sizes[path, "output"] = read[0].numel(), out.numel()

        module.register_forward_hook(hook)

    for path, module in run.model.named_modules():
        if path.startswith(WITHIN):
            hooked(path, module)
    return sizes


def largest(what: str, ranks: Iterable[Sizes], whole: Sizes) -> float:
    """The largest part on any rank of any "input", "output" or "weight"."""
    return max(sizes[key] / whole[key] for sizes in ranks for key in whole if key[1] == what)


WITHIN = "blocks."
"""What names in blocks begin with."""


def _built(layers: int) -> gpt.GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return gpt.GPT(dataclasses.replace(SHAPE, layers=layers)).double()


_MODELS = {layers: _built(layers) for layers in (2, 3)}
"""Built here: ranks are threads, and would race for torch's generator."""
