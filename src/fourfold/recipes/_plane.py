"""A GPT by SUMMA on q x q ranks, or on d layers of them: one step, beside one process's.

What one layer sends is the difference between models of three blocks and of two, without what lies outside of blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.ledger import Flow
from fourfold.models import gpt
from fourfold.recipes import _grid
from fourfold.verify.measure import between
from fourfold.verify.serial import SerialStep
from fourfold.wire import World

SHAPES = {
    2: gpt.Config(vocabulary=72, context=8, width=64, heads=4),
    3: gpt.Config(vocabulary=72, context=8, width=144, heads=6),
}
"""By q: everything divides, and fills whole cache lines on every rank."""

ROWS, LENGTH = 36, 4
TOKENS = ROWS * LENGTH
LAYERS = (2, 3)


class Expected(NamedTuple):
    """What one process makes of it.

    Attributes:
        steps: by the model's blocks.
        sizes: elements of what lies in blocks, of the smaller model.
    """

    steps: Mapping[int, SerialStep]
    sizes: _grid.Sizes


class Outcome(NamedTuple):
    """A rank's step.

    Attributes:
        loss, gradients: how far they are from those of one process.
        weight, activation: largest part on a rank of one in a block: of what its modules read and give.
        sent: elements that a layer's linears send.
        deep: elements that the sum of a layer's gradients over the layers of the grid sends.
    """

    loss: float
    gradients: float
    weight: float
    activation: float
    sent: float
    deep: float


def linears(q: int) -> list[tuple[int, int]]:
    """Input and output features of a layer's linears."""
    h = SHAPES[q].width
    return [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]


def expected(q: int) -> Expected:
    """What must come out."""
    steps = {layers: _grid.serial(_MODELS[q, layers], given=batch()) for layers in LAYERS}
    run = _grid.placed(_grid.alone(), {}, _MODELS[q, LAYERS[0]], given=batch())
    sizes = _grid.watch(run)
    run.step(batch())
    return Expected(steps, sizes)


def batch(parts: int = 1) -> dict[str, Tensor]:
    """The global batch, or the first of so many parts of it."""
    generator = torch.Generator().manual_seed(7)
    return {"tokens": torch.randint(72, (ROWS, LENGTH + 1), generator=generator)[: ROWS // parts]}


def largest(ranks: Sequence[Outcome]) -> Outcome:
    """The largest figures of any rank."""
    return Outcome(*map(max, *ranks)) if len(ranks) > 1 else ranks[0]


def outcome(world: World, q: int, placement: Mapping[str, Any], expected: Expected, parts: int = 1) -> Outcome:
    """A step on a plan; with `parts`, on the first part of the batch alone."""
    given, whole = batch(parts), expected.sizes
    few, many = (_step(world, _MODELS[q, layers], placement, expected.steps[layers], given) for layers in LAYERS)
    return Outcome(
        loss=max(few.loss, many.loss),
        gradients=max(few.gradients, many.gradients),
        weight=_grid.largest("weight", [few.sizes], whole),
        activation=max(_grid.largest(what, [few.sizes], whole) for what in ("input", "output")),
        sent=many.sent - few.sent,
        deep=many.deep - few.deep,
    )


class _Step(NamedTuple):
    loss: float
    gradients: float
    sizes: _grid.Sizes
    sent: float
    deep: float


def _step(
    world: World, model: gpt.GPT, placement: Mapping[str, Any], expected: SerialStep, given: Mapping[str, Tensor]
) -> _Step:
    run = _grid.placed(world, placement, model, given=given)
    sizes = _grid.watch(run)
    loss = run.step(given).loss
    flows = run.ledger.traffic(0)
    panels = sum(one.bytes for flow, one in flows.items() if flow.op in ("broadcast", "reduce"))
    deep = flows.get(Flow("data", "gradient", "all_reduce"))
    return _Step(
        loss=between(loss, expected.loss).error,
        gradients=_grid.error(run, expected.gradients),
        sizes=sizes,
        sent=panels / _grid.ITEM,
        deep=0.0 if deep is None else deep.bytes / _grid.ITEM,
    )


def _built(q: int, layers: int) -> gpt.GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return gpt.GPT(dataclasses.replace(SHAPES[q], layers=layers)).double()


_MODELS = {(q, layers): _built(q, layers) for q in SHAPES for layers in LAYERS}
"""Built here: ranks are threads, and would race for torch's generator."""
