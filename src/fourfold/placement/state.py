"""`state_dict()` of a placed model, or of any part of it, answers with the weights even where they are freed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from fourfold.placement.unit import Unit


def answer_state_dict(model: nn.Module, units: Sequence[Unit]) -> None:
    """Gather what a `state_dict()` call asks for while it is being answered. All ranks call it together."""
    transient = [unit for unit in units if unit.arena.transient]
    homes = {id(parameter): unit for unit in transient for parameter in unit.parameters.values()}
    for module in model.modules():
        under = list(dict.fromkeys(homes[id(p)] for p in module.parameters() if id(p) in homes))
        if under:
            _Answer(under).attach(module)


class _Answer:
    """The hooks of one module around its `state_dict`."""

    def __init__(self, units: Sequence[Unit]):
        self.units = units
        self._open: list[ExitStack] = []

    def attach(self, module: nn.Module) -> None:
        module.register_state_dict_pre_hook(self._gather)
        # torch marks the hook with an attribute, which a bound method would not take.
        module.register_state_dict_post_hook(lambda *about: self._copy(*about))

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
        self._open.pop().close()
