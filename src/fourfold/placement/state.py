"""`state_dict()` and `load_state_dict()` of a placed model, or of a part of it, mean its weights, not what is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.placement.layout import Slot
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.split import Split
from fourfold.placement.uncopied import Uncopied
from fourfold.placement.unit import Unit
from fourfold.torch_private import take_assign


def answer_state_dict(model: nn.Module, units: Sequence[Unit], split: Split | None) -> None:
    """Gather what a `state_dict()` call asks for while it is being answered. All ranks call it together."""
    incomplete = [unit for unit in units if unit.arena.transient or split is not None]
    homes = {id(parameter): unit for unit in incomplete for parameter in unit.parameters.values()}
    names = {id(parameter): name for unit in incomplete for name, parameter in unit.parameters.items()}
    for module in model.modules():
        under = list(dict.fromkeys(homes[id(p)] for p in module.parameters() if id(p) in homes))
        if under:
            _Answer(under, names, split).attach(module)


class _Answer(Uncopied):
    """The hooks of one module around its `state_dict`."""

    def __init__(self, units: Sequence[Unit], names: Mapping[int, str], split: Split | None):
        self.units, self.names, self.split = units, names, split
        self._open: list[ExitStack] = []

    def attach(self, module: nn.Module) -> None:
        module.register_state_dict_pre_hook(self._gather)
        # torch marks the hook with an attribute, which a bound method would not take.
        module.register_state_dict_post_hook(partial(self._copy))

    def _gather(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        stack = ExitStack()
        for unit in self.units:
            stack.enter_context(unit.pinned())
        self._open.append(stack)

    def _copy(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
        """The answer must outlive the gathered weights."""
        for name, value in state.items():
            if isinstance(value, Tensor) and name.startswith(prefix):
                state[name] = value.detach().clone()
        if self.split is not None and self.split.takeover.switch.split:  # inside `gathered` they are whole already
            self._assemble(self.split, module, prefix, state)
        self._open.pop().close()

    def _assemble(self, split: Split, module: nn.Module, prefix: str, state: dict[str, Any]) -> None:
        """The module's own weights whole; those of modules inside it have been answered before."""
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name, key = self.names.get(id(parameter)), prefix + attribute
            if name is not None and key in state:
                state.update({key: split.assembly.assembled({name: state[key]})[name]})


def write_loaded_state(model: nn.Module, units: Sequence[Unit], split: Split | None) -> None:
    """`load_state_dict()` sets the master weights: each rank its own rows, of a state that is the same on all ranks.

    Without this it would set what is gathered just now, and the next update would forget it.
    """
    loading = _Loading(units, split)
    for module in model.modules():
        module.register_load_state_dict_pre_hook(loading.write)
        module.register_load_state_dict_post_hook(loading.finish)


class _Loading(Uncopied):
    """The hooks of all modules around a `load_state_dict` of any of them.

    Torch then also copies into the parameters, which is needless but must find room: they get it, and lose it again.
    """

    def __init__(self, units: Sequence[Unit], split: Split | None):
        self.split = split
        self.homes: dict[int, tuple[Unit, Slot]] = {
            id(unit.parameters[slot.name]): (unit, slot) for unit in units for slot in unit.arena.layout.slots
        }
        self._root: nn.Module | None = None
        self._changed: dict[int, Unit] = {}

    def write(
        self, module: nn.Module, state: dict[str, Any], prefix: str, about: dict[str, Any], *outcome: Any
    ) -> None:
        """Before torch loads a module's own weights."""
        if take_assign(about):
            raise PlacementError(
                "load_state_dict(assign=True) would put other parameters in the place of the placed ones; "
                "expected assign=False, which copies the values"
            )
        if self.split is not None and not self.split.takeover.switch.split:
            raise PlacementError(
                "load_state_dict would set weights that were gathered for reading, and that are gone after "
                "`with run.gathered():`; call it outside"
            )
        if self._root is None or not prefix:  # the model is loaded, or a part of it: an earlier load may have failed
            self._root, self._changed = module, {}
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            if id(parameter) not in self.homes or not isinstance(value, Tensor):
                continue
            unit, slot = self.homes[id(parameter)]
            if unit.index not in self._changed:
                self._changed[unit.index] = unit
                unit.make_room()
            # Torch has words for a wrong shape; like it, take one element for a weight without dims.
            if value.shape == slot.block.logical or (not slot.shape and value.shape == (1,)):
                state[prefix + name] = value if slot.block.is_whole else slot.block.take(value)
                _write_rows(unit, slot, state[prefix + name])

    def finish(self, module: nn.Module, incompatible: Any) -> None:
        """After a module; after the last one, every rank brings its resting weights up to date, in one order."""
        if module is not self._root:
            return
        self._root = None
        for _, unit in sorted(self._changed.items()):
            unit.free()
            unit.refresh(whole=True)


@torch.no_grad()
def _write_rows(unit: Unit, slot: Slot, value: Tensor) -> None:
    first, last = slot.span(unit.arena.index)
    rows = unit.arena.shard[slot.shard_start : slot.shard_start + last - first]
    rows.copy_(value.reshape(-1)[first:last])
