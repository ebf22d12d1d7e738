"""Norms over features that lie over an axis: what a module asks of torch about its features, it gets over all ranks.

The module's own code runs, whatever the model's authors made of it: torch's layer and RMS norms, and the means, sums
and variances of any other, are taken over the axis. Each of them is one message forward and one backward.

A mean and a variance travel together: every rank sends the mean and the squared deviations of its own features, and all
merge what they get by the formula of Chan, Golub and LeVeque (1983, The American Statistician 37(3), 242-247). Neither
is a difference of large numbers, so features far from zero lose no digits, as they would to a sum of squares. The
message is gathered, which sends size/2 times the bytes of a sum in half its rounds: two numbers a token are latency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.wire import Axis, ops


class NormExecutor(Executor):
    """A norm whose input has its last dim cut over `axis`; `sizes`: how many features every rank has."""

    def __init__(self, switch: Switch, module: nn.Module, path: str, axis: Axis, sizes: Sequence[int]) -> None:
        super().__init__(switch, module)
        self.path, self.axis, self.sizes, self.size = path, axis, tuple(sizes), sum(sizes)

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


def moments(x: Tensor, axis: Axis, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Deviations from the mean, and the variance (biased), of features that lie over an axis.

    Args:
        x: [..., features here].
        sizes: how many features every rank has.

    Returns:
        ([..., features here], [..., 1]), in the type of `x`. Both have gradients of any order.
    """
    return _Moments.apply(x, axis, tuple(sizes))


class _Moments(torch.autograd.Function):
    """One gather of (mean, squared deviations) forward, one sum of both gradients' row sums backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        ctx.axis, ctx.size = axis, sum(sizes)
        mean = x.mean(-1, keepdim=True)
        own = torch.stack((mean, (x - mean).square().sum(-1, keepdim=True)))
        every = ops.gather_cut(own, axis, dim=0).unflatten(0, (axis.size, 2))
        means, squares = every.unbind(1)
        apart = means - means[0]  # small beside a large mean
        middle = _weighted(apart, sizes) / ctx.size
        variance = (squares.sum(0) + _weighted((apart - middle).square(), sizes)) / ctx.size
        centred = x - (means[0] + middle)
        ctx.save_for_backward(centred)
        return centred, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (centred,) = ctx.saved_tensors
        deviations, variance = grads
        sums = ops.sum_sum(torch.stack((deviations.sum(-1, keepdim=True), variance)), ctx.axis, "activation-gradient")
        return deviations - (sums[0] - 2 * centred * sums[1]) / ctx.size, None, None


def _weighted(each: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sum over the first dim of so many times each. Weights are numbers: a tensor of them would be copied to a GPU."""
    if len(set(sizes)) == 1:
        return each.sum(0) * sizes[0]
    return torch.stack([one * size for one, size in zip(each, sizes, strict=True)]).sum(0)


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
    centred, variance = moments(x.float() if x.dtype.itemsize < 4 else x, norm.axis, norm.sizes)
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
    by = float(unbiased) if correction is None else correction
    _, variance = moments(x.float() if x.dtype.itemsize < 4 else x, norm.axis, norm.sizes)
    variance = (variance * (norm.size / (norm.size - by))).to(x.dtype)
    return variance if keepdim else variance.squeeze(-1)


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
