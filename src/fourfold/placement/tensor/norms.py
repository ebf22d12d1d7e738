"""Norms over features that lie over an axis: what a module asks of torch about its features, it gets over all ranks.

The module's own code runs, whatever the model's authors made of it: torch's layer and RMS norms, and the means, sums
and variances of any other, are taken over the axis. A message holds one or two numbers a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.wire import Axis, ops


class NormExecutor(Executor):
    """A norm whose input has its last dim cut over `axis`; `size` features in all."""

    def __init__(self, switch: Switch, module: nn.Module, path: str, axis: Axis, size: int) -> None:
        super().__init__(switch, module)
        self.path, self.axis, self.size = path, axis, size

    def on_blocks(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[..., features here] → same."""
        with _OverAxis(self, x.shape[-1]):
            return self.inner(x, *args, **kwargs)


class GroupExecutor(Executor):
    """A group norm over channels that lie over an axis in whole groups: it has as many of them as are here."""

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """[rows, channels here, …] → same."""
        with _GroupsHere(self.module):
            return self.inner(*args, **kwargs)


class _GroupsHere(TorchFunctionMode):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm: Any = norm

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.group_norm and args[1] == self.norm.num_groups:
            here = args[1] * args[0].shape[1] // self.norm.num_channels
            return func(args[0], here, *args[2:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _OverAxis(TorchFunctionMode):
    """Reductions over the last dim of a tensor with this rank's features are taken over the axis."""

    def __init__(self, norm: NormExecutor, here: int) -> None:
        super().__init__()
        self.norm, self.here = norm, here

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        known = _KNOWN.get(func)
        if known is not None and args and args[0].shape[-1:] == (self.here,):
            return known(self.norm, *args, **kwargs)
        if func in (F.group_norm, torch.group_norm):
            raise PlacementError(
                f"{self.norm.path}: a group of its channels lies over several ranks of {self.norm.axis.name}; expected "
                f"whole groups on every rank. Leave out plan.placement.tensor.{self.norm.axis.name}"
            )
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and args and isinstance(args[0], Tensor) and args[0].dim():
            self._refuse_reduction(func, args[0], result)
        return result

    def _refuse_reduction(self, func: Callable, x: Tensor, result: Tensor) -> None:
        """A reduction that nobody here knows would be one of this rank's features alone."""
        if x.shape[-1] != self.here or self.here == 1:
            return
        if result.shape in (x.shape[:-1], (*x.shape[:-1], 1)):
            raise PlacementError(
                f"{self.norm.path}: calls {func.__name__} across features that are cut over {self.norm.axis.name}; "
                "expected torch's layer or RMS norm, or means, sums and variances over the last dim. Leave out "
                f"plan.placement.tensor.{self.norm.axis.name}"
            )


def _layer_norm(
    norm: NormExecutor,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Mean and squared deviations in one message each: the second is taken around the mean of all features."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    centred = wide - ops.sum_sum(wide.sum(-1, keepdim=True), norm.axis) / norm.size
    variance = ops.sum_sum(centred.square().sum(-1, keepdim=True), norm.axis) / norm.size
    return _scaled((centred * torch.rsqrt(variance + eps)).to(x.dtype), weight, bias)


def _rms_norm(
    norm: NormExecutor, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    wide = x.float() if x.dtype.itemsize < 4 else x
    square = ops.sum_sum(wide.square().sum(-1, keepdim=True), norm.axis) / norm.size
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled((wide * torch.rsqrt(square + eps)).to(x.dtype), weight, None)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _mean(norm: NormExecutor, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return _sum(norm, x, dim, keepdim, dtype=dtype) / norm.size


def _sum(norm: NormExecutor, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    _last(norm, x, dim, "a sum")
    return ops.sum_sum(x.sum(-1, keepdim=keepdim, dtype=dtype), norm.axis)


def _var(
    norm: NormExecutor,
    x: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    _last(norm, x, dim, "a variance")
    centred = x - _mean(norm, x, -1, True)
    total = ops.sum_sum(centred.square().sum(-1, keepdim=keepdim), norm.axis)
    return total / (norm.size - (float(unbiased) if correction is None else correction))


def _last(norm: NormExecutor, x: Tensor, dim: Any, what: str) -> None:
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if dims not in ((-1,), (x.dim() - 1,)):
        raise PlacementError(
            f"{norm.path}: takes {what} over dims {dim} of features that are cut over {norm.axis.name}; expected the "
            f"last dim alone. Leave out plan.placement.tensor.{norm.axis.name}"
        )


_KNOWN: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    Tensor.mean: _mean,
    torch.mean: _mean,
    Tensor.sum: _sum,
    torch.sum: _sum,
    Tensor.var: _var,
    torch.var: _var,
}
