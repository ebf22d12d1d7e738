"""A plain model becomes a placed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.anatomy import Anatomy
from fourfold.placement.arena import Arena, Fill
from fourfold.placement.block import Block as Wrapped
from fourfold.placement.block import Neighbours
from fourfold.placement.cut import Block
from fourfold.placement.layout import Layout
from fourfold.placement.membership import Group, Members, members
from fourfold.placement.pipe.hollow import hollow
from fourfold.placement.pipe.line import Line
from fourfold.placement.pipe.part import Part
from fourfold.placement.placed import Placed
from fourfold.placement.precision import Precision
from fourfold.placement.reach import reached
from fourfold.placement.refusals import refuse
from fourfold.placement.seats import room
from fourfold.placement.state import answer_state_dict, write_loaded_state
from fourfold.placement.tensor import trial
from fourfold.placement.tensor.kernels import Kernels
from fourfold.placement.tensor.rehearsal import Loss, Stage
from fourfold.placement.tensor.split import Split, rehearsed
from fourfold.placement.tensor.tuning import Tuning
from fourfold.placement.unit import Unit
from fourfold.plan import Codec, Events, Placement
from fourfold.wire import Axis, Mesh


def place(
    model: nn.Module,
    anatomy: Anatomy,
    mesh: Mesh,
    options: Placement,
    *,
    fill: Fill,
    group: Group,
    events: Events,
    device: torch.device,
    codec: Codec | None = None,
    seats: bool = False,
    loss: Loss | None = None,
    example: Mapping[str, Tensor] | None = None,
    part: Part | None = None,
) -> Placed:
    """Give a plain model arenas for its weights, in place.

    Args:
        model: on the meta device, or with weights (which `fill` then reads).
        anatomy: of the model.
        mesh: this rank's.
        options: the placement.
        fill: source of logical weights.
        group: sorts trained parameters for the optimizer.
        events: told when a unit's gradient is ready.
        device: where everything goes.
        codec: the form in which gradients cross over z.
        seats: numbers of every rank travel behind the gradient that leaves last, which the rule sums over all ranks.
        loss, example: by which a model whose features are cut is rehearsed.
        part: the pipeline stages that this rank holds; None: all there is.
    """
    refuse(model, anatomy, ranks=options.parts)
    precision = Precision.of(options.precision, device)
    split = _split(model, anatomy, mesh, options, precision, loss, example) if options.grid.cuts_features else None
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    sorted_ = _members(model, anatomy, group, options, precision, mesh, split, part)
    dealt = zip(sorted_, _layouts(sorted_, mesh, split, part), strict=True)
    units: list[Unit] = []
    for index, (member, layout) in enumerate(dealt):
        leaves_last = layout.trained > 0 and not any(unit.arena.layout.trained for unit in units)
        passengers = room(options.parts) if seats and leaves_last else 0
        arena = _arena(member, layout, mesh, options, precision, device, passengers)
        arena.fill(fill)
        hold, axis = options.shard == "optimizer", _axis(member, mesh)
        about: dict[str, Any] = {"codec": codec, "outer": member.outer, "stages": _stages(member, part)}
        units.append(Unit(index, member.name, arena, axis, member.owners, hold, **about))
    for unit in units:
        unit.install()
    if part is not None:
        hollow(model, frozenset(part.weights) - {name for unit in units for name in unit.parameters})
    _place_buffers(model, precision, device)
    if split is not None:
        split.install(model)
    placed = Placed(model, anatomy, mesh, options, units, events, split, part)
    _wrap_blocks(placed, sorted_, reached(anatomy, trained))
    _line_up(placed)
    answer_state_dict(model, units, split)
    write_loaded_state(model, units, split)
    return placed


def _split(
    model: nn.Module,
    anatomy: Anatomy,
    mesh: Mesh,
    options: Placement,
    precision: Precision,
    loss: Loss | None,
    example: Mapping[str, Tensor] | None,
) -> Split:
    """How features are cut: rehearsed, and tried on numbers."""
    assert loss is not None and example is not None
    stage = Stage.of(model, loss, example, anatomy.traced, precision.compute)
    split = rehearsed(stage, anatomy, mesh, options.grid, _tuning(options))
    trial.attempt(split, model, stage.loss)
    return split


def _tuning(options: Placement) -> Tuning:
    return Tuning(options.overlap, options.chunks, Kernels() if options.kernels == "tuned" else None)


def _line_up(placed: Placed) -> None:
    """A pipeline's layers know, from now on, which stage runs; those of this rank may leave gradients undone."""
    model, split, part = placed.model, placed.split, placed.part
    if part is None:
        return
    if part.splits:
        placed.deferral.attach(module for path in part.paths for module in model.get_submodule(path).modules())
    between = None if split is None else split.takeover.between
    placed.line = Line(model, part.layers, part.bounds, placed.anatomy.blocks, between)


def _axis(member: Members, mesh: Mesh) -> Axis:
    """Over which its rows are cut."""
    return mesh.over() if member.still else mesh["z"]


def _arena(
    member: Members,
    layout: Layout,
    mesh: Mesh,
    options: Placement,
    precision: Precision,
    device: torch.device,
    passengers: int,
) -> Arena:
    resident = member.still or not _sharded(options, mesh)
    index = _axis(member, mesh).index
    return Arena(layout, precision, index, resident=resident, device=device, passengers=passengers)


def _sharded(options: Placement, mesh: Mesh) -> bool:
    return options.shard == "parameters" and mesh["z"].size > 1


def _members(
    model: nn.Module,
    anatomy: Anatomy,
    group: Group,
    options: Placement,
    precision: Precision,
    mesh: Mesh,
    split: Split | None,
    part: Part | None,
) -> list[Members]:
    """Which weights travel together; none with those of another stage."""
    about: dict[str, Any] = {
        "bucket": options.message,
        "apart": _sharded(options, mesh) or precision.upcast,
        "itemsize": precision.message.itemsize,
        "still": frozenset() if split is None else split.assembly.still,
    }
    each = [None] if part is None else [part.held(stage) for stage in part.stages]
    return [member for held in each for member in members(model, anatomy, group, held=held, **about)]


def _stages(member: Members, part: Part | None) -> frozenset[int]:
    """The stages of this rank that read one of these weights."""
    return frozenset({0}) if part is None else part.readers(name for name, _, _ in member.weights)


def _layouts(sorted_: Sequence[Members], mesh: Mesh, split: Split | None, part: Part | None) -> list[Layout]:
    blocks = {} if split is None else dict(split.assembly.blocks())
    shapes = {name: shape for member in sorted_ for name, shape, _ in member.weights}
    for name in () if part is None else part.copied:
        blocks[name] = replace(blocks.get(name) or Block.whole(shapes[name]), owned=False)
    return [Layout.of(member.weights, 1 if member.still else mesh["z"].size, blocks) for member in sorted_]


def _place_buffers(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Buffers are replicated, and shared ones stay shared; in fp64 the floating ones are widened."""
    placed: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            wide = precision.compute == torch.float64 and buffer.is_floating_point()
            if id(buffer) not in placed:
                placed[id(buffer)] = buffer.to(device=device, dtype=torch.float64 if wide else buffer.dtype)
            module._buffers[name] = placed[id(buffer)]


def _wrap_blocks(placed: Placed, sorted_: list[Members], comes_to: Set[str]) -> None:
    """Take over the blocks' forwards; what has no block is brought in around the whole forward."""
    modules = dict(placed.model.named_modules())
    homes: dict[str, tuple[Unit, bool, bool]] = {}
    here = None if placed.part is None else placed.part.paths
    for unit, member in zip(placed.units, sorted_, strict=True):
        if member.outer:
            placed.outer.append(unit)
        if member.blocks:
            placed.inner.append(unit)
        if not comes_to.isdisjoint(member.blocks):
            placed.reached.append(unit)
        for path in member.blocks:
            homes[path] = unit, path == member.blocks[0], path == member.blocks[-1]
    for path in placed.anatomy.blocks:
        if here is not None and path not in here:
            continue
        # A block all of whose weights are used outside, too, has no unit of its own: it brings none in, and frees none.
        unit, first, last = homes.get(path) or (placed.outer[0], False, False)
        block = Wrapped(
            path,
            modules[path],
            unit,
            placed.departures,
            recompute=placed.options.recompute,
            random=bool(placed.anatomy.dropouts),
            torchs=bool(placed.anatomy.random_calls),
            first=first,
            last=last,
        )
        if unit in placed.inner:
            block.neighbours = _neighbours(placed, unit)
            block.keep = unit is placed.turning
        placed.blocks.append(block)


def _neighbours(placed: Placed, unit: Unit) -> Neighbours:
    inner, ahead = [other for other in placed.inner if other.stages & unit.stages], placed.options.overlap
    at = inner.index(unit)
    return Neighbours(
        before=inner[at - 1] if ahead and at > 0 and inner[at - 1] in placed.reached else None,
        after=inner[at + 1] if ahead and at + 1 < len(inner) else None,
    )
