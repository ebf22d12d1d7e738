"""The logical boxes of everything in a run that has a logical shape: weights, optimizer state, buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fourfold import torch_private
from fourfold.placement import Piece, Placed
from fourfold.training.checkpoint import Box
from fourfold.training.optimizer import Optimizer
from fourfold.training.step import Step


def boxes_to_read(step: Step) -> list[Box]:
    """Everything that this rank holds of weights, optimizer state and buffers."""
    return _boxes(step, _all_names(step), _buffers(step.placed))


def boxes_to_write(step: Step) -> list[Box]:
    """This rank's share: on the ranks of one replica they cover every element exactly once.

    Of what several ranks hold, one writes it: weights whose block another rank owns, and buffers, which the first rank
    of the replica writes.
    """
    slots = (slot for unit in step.placed.units for slot in unit.arena.layout.slots)
    first = step.mesh.over("x", "y", "z").index == 0
    return _boxes(
        step, {slot.name for slot in slots if slot.block.owned}, _buffers(step.placed, own=True) if first else ()
    )


def _boxes(step: Step, names: set[str], buffers: Iterable[tuple[str, Tensor]]) -> list[Box]:
    placed = step.placed
    boxes = [box for name, box in _weights(placed) if name in names]
    states = iter(step.optimizer.state_dict())
    for shard in placed.shards:
        state, pieces = next(states), [piece for piece in shard.pieces if piece.name in names]
        for kind, flat in state.items():
            if flat.shape == shard.parameter.shape and kind in step.optimizer.state_names:
                boxes += [_box(f"optimizer.{kind}.{piece.name}", piece, flat) for piece in pieces]
    return boxes + [Box.whole(f"buffer.{name}", buffer) for name, buffer in buffers]


def names_of(step: Step) -> set[str]:
    """The names of all ranks' boxes: of a weight without dims, which cannot be cut, only one rank has a box."""
    part = step.placed.part
    if part is None:
        layouts = [unit.arena.layout for unit in step.placed.units]
        every = {slot.name for layout in layouts for slot in layout.slots}
        trained = {slot.name for layout in layouts for slot in layout.trained_slots}
    else:
        every = set(part.weights)
        trained = {name for name, weight in part.weights.items() if weight.trained}
    names = {f"buffer.{name}" for name, _ in _buffers(step.placed)} | {f"model.{name}" for name in every}
    return names | {f"optimizer.{kind}.{name}" for kind in step.optimizer.state_names for name in trained}


def not_finite(placed: Placed) -> str | None:
    """A trained weight of which this rank holds a NaN or an infinity, if there is one."""
    for shard in placed.shards:
        values = shard.parameter.detach()
        if not values.isfinite().all():
            for piece in shard.pieces:
                if not piece.of(values).isfinite().all():
                    return piece.name
    return None


def _all_names(step: Step) -> set[str]:
    return {slot.name for unit in step.placed.units for slot in unit.arena.layout.slots}


def _weights(placed: Placed) -> Iterator[tuple[str, Box]]:
    for unit in placed.units:
        for slot in unit.arena.layout.slots:
            for piece in slot.pieces(unit.arena.index):
                yield piece.name, _box(f"model.{piece.name}", piece, unit.arena.shard)


def _box(name: str, piece: Piece, flat: Tensor) -> Box:
    return Box(name, piece.shape, piece.offsets, piece.of(flat))


def _buffers(placed: Placed, *, own: bool = False) -> Iterable[tuple[str, Tensor]]:
    """Persistent buffers; a buffer that is shared comes once. `own`: those that this rank's stages keep right."""
    persistent = {
        f"{path}.{name}" if path else name
        for path, module in placed.model.named_modules()
        for name in torch_private.persistent_buffers(module)
    }
    found = [(name, buffer) for name, buffer in placed.model.named_buffers() if name in persistent]
    part = placed.part
    if part is None or not own:
        return found
    return [(name, buffer) for name, buffer in found if part.home(name.rpartition(".")[0]) == part.worker]


def scalars_of(optimizer: Optimizer) -> dict[str, float]:
    """The optimizer's state without a logical shape (AdamW's step): the same for all shards, so kept once."""
    return {
        kind: float(value)
        for state in optimizer.state_dict()
        for kind, value in state.items()
        if kind not in optimizer.state_names
    }


def set_scalars(optimizer: Optimizer, scalars: Mapping[str, Any]) -> None:
    """Restore what `scalars_of` gave, into every shard's state."""
    for state in optimizer.state_dict():
        for kind, value in state.items():
            if kind not in optimizer.state_names:
                value.fill_(scalars[kind])
