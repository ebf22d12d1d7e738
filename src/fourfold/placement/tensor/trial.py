"""A trial on numbers: a step of the split model, on threads of this process, beside the same step of the whole one.

A rehearsal compares shapes and functions. What it cannot see is a gradient that is of a part and that nobody sums, or
a choice by values. So, before anything is allocated, the first rank lets the ranks of x and y be threads, gives them
blocks of weights of its own making, and compares the loss and every gradient with those of the whole model, in float64.
The model is in training, where dropouts leave values alone. That costs about three steps of one process on a few rows;
where this is too much, `Split.untried` says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.anatomy import own_names
from fourfold.anatomy.blocks import Calls
from fourfold.anatomy.rehearsal import Rehearsal
from fourfold.anatomy.twin import twin
from fourfold.ledger import Ledger
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.regions import LossScope
from fourfold.placement.tensor.rehearsal import Loss
from fourfold.placement.tensor.split import Split
from fourfold.plan.grid import Grid
from fourfold.wire import Axis, Mesh, RankFailed, Stalled, World
from fourfold.wire.threads import launch

MOST_RANKS = 16
"""Of x and y: that many threads are tried."""

MOST_WEIGHTS = 1 << 25
"""Of the whole model: at most a gigabyte or so, for the twin, its blocks and both gradients in float64."""

MOST_PRODUCTS = 1 << 31
"""Weights times positions of the example: a second or two of a processor."""

ROWS = 3
"""At least so many: a loss that holds rows against one another has no gradient on one, and a wrong one may show on
none where two rows are each other's only contrast."""

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Types to try in, the next where a model does not run in the one before (grouped products are not there in float64),
with what may be off, of the largest element of a gradient (or a hundredth of the largest of all). Models that cast to
float32 inside are some 1e-7 off; the wrong gradients that were ever found, 3e-3 and more."""


class Place(NamedTuple):
    """Of a rank on the axes."""

    x: int
    y: int
    z: int

    def __str__(self) -> str:
        return f"on the rank with x = {self.x}, y = {self.y}{f', z = {self.z}' if self.z else ''}"


class Outcome(NamedTuple):
    """The loss of one step, and the gradients of whatever has one, by name."""

    loss: float
    gradients: dict[str, Tensor]


def attempt(split: Split, model: nn.Module, loss: Loss) -> None:
    """Compare one step of the split model with that of the whole one. All ranks call it together.

    Args:
        split: rehearsed.
        model: the plain one, its buffers filled; it is not changed.

    Raises:
        PlacementError: they differ, or the split model fails; names the weight.
    """
    refusal = b""
    if split.mesh.everyone.index == 0:
        split.untried = _too_much(split, model)
        if not split.untried:
            try:
                split.untried = _tried(split, model, loss)
            except PlacementError as found:
                refusal = str(found).encode()
    _agree(split.mesh.everyone, refusal)


def _agree(everyone: Axis, refusal: bytes) -> None:
    """All ranks refuse in the words of the first.

    Raises:
        PlacementError: there are some.
    """
    length = int(everyone.collect([float(len(refusal))])[0][0])
    if length:
        words = everyone.collect([float(code) for code in refusal] or [0.0] * length)[0]
        raise PlacementError(bytes(map(int, words)).decode())


def _too_much(split: Split, model: nn.Module) -> str:
    """Why no trial is made, in words; empty if one is."""
    ranks = math.prod(_sizes(split).values())
    if ranks > MOST_RANKS:
        return f"features lie over {ranks} ranks, more than {MOST_RANKS}"
    weights = sum(parameter.numel() for parameter in model.parameters())
    positions = max((tensor.shape[:2].numel() for tensor in _enough(split.example).values()), default=1)
    if weights > MOST_WEIGHTS or weights * positions > MOST_PRODUCTS:
        return f"{weights:,} weights on {positions:,} positions are too much for a trial"
    return ""


def _sizes(split: Split) -> dict[str, int]:
    """Of the axes that a forward knows, x fastest: z is one of them where weights are cut over it by features."""
    z = split.way.inside(Grid(z=split.mesh["z"].size)).z
    return {"x": split.mesh["x"].size, "y": split.mesh["y"].size, "z": z}


def _numbered(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A twin of this type on CPU, in training, with weights drawn here: nothing is read, and nothing is zero."""
    names, generator = own_names(model), torch.Generator().manual_seed(0)

    def weight(parameter: Tensor) -> Tensor:
        if not parameter.is_floating_point():
            return torch.zeros(parameter.shape, dtype=parameter.dtype)
        drawn = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        if parameter.dim() > 1:
            return drawn * (parameter.numel() / max(1, len(parameter))) ** -0.5
        owner, _, attribute = names[id(parameter)].rpartition(".")
        scales = attribute == "weight" and "norm" in type(model.get_submodule(owner)).__name__.lower()
        return 0.2 * drawn + (1.0 if scales else 0.0)

    found = twin(model, weight, partial(_on_cpu, dtype=dtype))
    return found if model.training else found.train()  # what a user has frozen by `eval()` stays so


def _on_cpu(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, of this type if it is floating."""
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


def _tried(split: Split, model: nn.Module, loss: Loss) -> str:
    """Why nothing can be said, in words; empty if both do the same.

    Raises:
        PlacementError: they do not.
    """
    reason = ""
    for dtype, tolerance in TOLERANCES.items():
        whole, batch = _numbered(model, dtype), _rolled(split.example, dtype)
        try:
            expected, again = (_step(twin(whole, Tensor.clone, Tensor.clone), loss, batch) for _ in range(2))
        except Exception as error:  # the model's own code, which may want another type, or a GPU
            reason = reason or f"the whole model does not run on a processor ({type(error).__name__}: {error})"
            continue
        if not math.isfinite(expected.loss):
            return "the loss is not finite with weights drawn at random"
        if expected.loss != again.loss:
            return "the model does not give the same loss twice"
        _hold(split, whole, loss, batch, expected, tolerance)
        return ""
    return reason


def _hold(
    split: Split, whole: nn.Module, loss: Loss, batch: Mapping[str, Tensor], expected: Outcome, tolerance: float
) -> None:
    """Let the ranks take the step, and compare each of them.

    Raises:
        PlacementError: one fails, or differs.
    """
    sizes = _sizes(split)
    try:
        found = launch(math.prod(sizes.values()), _rank, split, whole, loss, batch, in_turn=True)
    except (RankFailed, Stalled) as failed:
        cause = failed.__cause__
        if isinstance(cause, PlacementError):
            raise cause from failed
        raise PlacementError(
            f"plan.placement.tensor: a step of the split model fails where the whole model's does not: {failed}; leave "
            "it out"
        ) from failed
    plane = sizes["x"] * sizes["y"]
    for rank, outcome in enumerate(found):
        others = [found[other].gradients for other in range(rank % plane, len(found), plane)]  # along z
        place = Place(rank % sizes["x"], rank % plane // sizes["x"], rank // plane)
        _compare(split, place, expected, outcome, others, tolerance)


def _enough(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The example, repeated until it has rows enough."""
    rows = min((len(tensor) for tensor in batch.values() if tensor.dim()), default=ROWS)
    times = -(-ROWS // max(1, rows))
    return {name: torch.cat([tensor] * times) if tensor.dim() else tensor for name, tensor in batch.items()}


def _rolled(batch: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The example on CPU; each row is turned by one place more than the one before, as some repeat others."""

    def rolled(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2:
            return tensor
        return torch.stack([row.roll(number, 0) for number, row in enumerate(tensor)])

    return {name: rolled(_on_cpu(tensor, dtype)) for name, tensor in _enough(batch).items()}


def _step(
    model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], scope: AbstractContextManager[Any] | None = None
) -> Outcome:
    """One step without dropout; `scope` is around the loss alone, as it is in training."""
    with Rehearsal(Calls()):
        with scope or nullcontext():
            total, _ = loss(model, {name: tensor.clone() for name, tensor in batch.items()})
        total.backward()  # a model's own checkpoints compute again
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return Outcome(float(total.detach()), gradients)


def _rank(world: World, split: Split, whole: nn.Module, loss: Loss, batch: Mapping[str, Tensor]) -> Outcome:
    """One thread: blocks of the weights, on a mesh of x and y alone."""
    mesh = Mesh(world, _sizes(split), Ledger())
    tuning = dataclasses.replace(split.tuning, kernels=None)
    own = dataclasses.replace(split, mesh=mesh, tuning=tuning, scope=LossScope())
    names = own_names(whole)

    def weight(parameter: Tensor) -> Tensor:
        return own.assembly.block(names[id(parameter)]).take(parameter.detach()).clone()

    model = twin(whole, weight, Tensor.clone)
    own.install(model)
    return _step(model, loss, batch, own.scope.around())


def _compare(
    split: Split,
    place: Place,
    expected: Outcome,
    found: Outcome,
    others: Sequence[Mapping[str, Tensor]],
    tolerance: float,
) -> None:
    """Hold what a rank found against what the whole model did.

    Args:
        others: gradients of all ranks along z. They were given the same rows, so gradients add up to as many times
            those of one; of weights that are cut over z by features the algorithm itself has added them up.

    Raises:
        PlacementError: they differ; names the weight that is most wrong.
    """
    largest = max((float(gradient.abs().max()) for gradient in expected.gradients.values()), default=0.0)
    off: dict[str, float] = {}
    for name, gradient in expected.gradients.items():
        block = split.assembly.cuts[name].at(place._asdict()).take(gradient)
        scale = max(float(gradient.abs().max()), largest / 100)
        summed = [found.gradients] if name in split.assembly.still else others
        mine = [one[name] for one in summed if name in one]
        wrong = block - sum(mine) / len(others) if mine else block
        error = float(wrong.abs().max()) / scale if wrong.numel() and scale else 0.0
        if not error <= tolerance:
            off[name] = error
    if abs(found.loss - expected.loss) > tolerance * abs(expected.loss):
        raise _refusal(f"the loss is {found.loss:.6g} {place}, and {expected.loss:.6g} in one process", off)
    if off:
        name = max(off, key=lambda one: off[one])
        raise _refusal(f"{name}: its gradient {place} is {off[name]:.2g} of the largest off that of one process", off)


def _refusal(what: str, off: Mapping[str, Any]) -> PlacementError:
    more = f" ({len(off)} weights have wrong gradients: {', '.join(sorted(off)[:4])}{', …' if len(off) > 4 else ''})"
    return PlacementError(
        f"plan.placement.tensor: tried on numbers, the split model does not do what the whole one does: {what}"
        f"{more if len(off) > 1 else ''}; leave it out, or choose algorithm: 1d if another was chosen"
    )
