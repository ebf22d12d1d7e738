"""Mixture-of-experts layers whose experts' weights are 3-D parameters, read expert by expert.

Every rank of x and y computes all experts for its own features. What all experts read is summed over in backward once,
and what they write is summed over in forward once: the module adds its experts up, and a sum of sums is a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.torch_private import map_leaves
from fourfold.wire import Axis, ops


class Role(NamedTuple):
    """Over which axes the input and the output features of a 3-D weight lie."""

    contract: Axis
    output: Axis


class ExpertsExecutor(Executor):
    """A module that computes experts by slices of its 3-D parameters.

    Attributes:
        path: of the module.
        roles: attribute of a parameter → its axes; a first layer reads what the module is given, a second one writes.
        features: input features of the module on this rank.
    """

    def __init__(
        self, switch: Switch, module: nn.Module, path: str, roles: Mapping[str, Role], features: int, outer: Axis
    ) -> None:
        super().__init__(switch, module)
        self.path, self.roles, self.features, self.outer = path, roles, features, outer

    @property
    def inner_axis(self) -> Axis:
        """Over which the experts' inner features lie."""
        return next(role.output for role in self.roles.values() if role.contract is self.outer)

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Tokens [tokens, features here], and what is whole: choices, and weights that scale what the experts make."""

        def entered(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            value = ops.identity_sum(value, self.inner_axis)
            return value if value.shape[-1] == self.features else ops.identity_sum(value, self.outer)

        with _Slices(self):
            found = self.inner(*map_leaves(entered, args), **map_leaves(entered, kwargs))
        return ops.sum_identity(found, self.inner_axis)


class _Slices(TorchFunctionMode):
    """Products with slices of the module's parameters are sums over the axis of their input features."""

    def __init__(self, experts: ExpertsExecutor) -> None:
        super().__init__()
        self.experts = experts
        self.parameters = {id(getattr(experts.module, name)): role for name, role in experts.roles.items()}
        self.slices: dict[int, tuple[Tensor, Role]] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        role = next((self.parameters[id(value)] for value in args if id(value) in self.parameters), None)
        if role is not None and func is not Tensor.__getitem__ and getattr(func, "__name__", "") != "__get__":
            raise PlacementError(
                f"{self.experts.path}: calls {getattr(func, '__name__', func)} on the weights of all its experts at "
                "once; expected experts computed one by one: set experts_implementation='eager' in transformers, or "
                "leave out plan.placement.tensor"
            )
        if func is F.linear and len(args) > 1 and id(args[1]) in self.slices:
            return self._product(self.slices[id(args[1])][1], *args, **kwargs)
        result = func(*args, **kwargs)
        if role is not None and isinstance(result, Tensor):
            self.slices[id(result)] = result, role  # the tensor is kept, so that its id stays its own
        return result

    def _product(self, role: Role, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if role.contract is self.experts.outer:
            partial = ops.sum_identity(F.linear(x, weight), role.contract)
            return partial if bias is None else partial + bias
        return F.linear(ops.identity_sum(x, role.output), weight)


def refuse(path: str, module: nn.Module) -> None:
    """Weights beside the experts' matrices, which would be added once on every rank.

    Raises:
        PlacementError: names the module and the weight.
    """
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() != 3:
            raise PlacementError(
                f"{path}.{name}: expected experts with a matrix each and nothing else, found {list(parameter.shape)}; "
                "leave out plan.placement.tensor"
            )
