"""Norms over features that lie over an axis: what a module asks of torch about its features, it gets over all ranks.

The module's own code runs, whatever the model's authors made of it: torch's layer and RMS norms, and the means, sums,
variances and lengths of any other, are taken over the axis, each by one message forward and one backward (a variance
with its mean: two). `spanning.py` says what becomes of other functions.

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

from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.placement.tensor.spanning import Followed, Place, Spanning, Spread, check_given, kept, over_last
from fourfold.wire import Axis, ops


class NormExecutor(Executor):
    """A norm whose input has its last dim cut over `axis`.

    Args:
        sizes: how many features every rank has.
        ordered: every rank has one run of them, in the order of ranks.
    """

    def __init__(
        self, switch: Switch, module: nn.Module, path: str, axis: Axis, sizes: Sequence[int], ordered: bool = True
    ) -> None:
        super().__init__(switch, module)
        self.spread = Spread(path, axis, tuple(sizes), ordered)

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """[..., features here] → same."""
        followed = Followed(self.spread)
        followed.mark_last((args, kwargs, list(self.module.parameters()), list(self.module.buffers())))
        with Spanning(followed, _KNOWN):
            found = self.inner(*args, **kwargs)
        check_given(followed, self.module, found)
        return found


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


def _layer_norm(
    followed: Followed,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    _own(followed, "layer_norm", x, shape, weight, bias)
    spread = followed.spread
    centred, variance = moments(_wide(x), spread.axis, spread.sizes)
    return followed.mark(_scaled((centred * torch.rsqrt(variance + eps)).to(x.dtype), weight, bias), Place(x.dim() - 1))


def _rms_norm(
    followed: Followed, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    _own(followed, "rms_norm", x, shape, weight)
    spread, wide = followed.spread, _wide(x)
    square = ops.sum_sum(wide.square().sum(-1, keepdim=True), spread.axis) / spread.size
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return followed.mark(_scaled((wide * torch.rsqrt(square + eps)).to(x.dtype), weight, None), Place(x.dim() - 1))


def _own(followed: Followed, what: str, x: Tensor, shape: Any, *weights: Tensor | None) -> None:
    """Refuse a norm of more dims than the features, or with weights that are not cut as they are."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    alike = all(weight is None or followed.place(weight) == Place(0) for weight in weights)
    if followed.place(x) != Place(x.dim() - 1) or len(sizes) != 1 or not alike:
        followed.spread.refuse(f"calls {what} of {list(sizes)}")


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _mean(followed: Followed, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if not over_last(followed, x, dim, "a mean"):
        return kept(followed, x, dim, keepdim, x.mean(dim, keepdim, dtype=dtype))
    return _sum(followed, x, dim, keepdim, dtype=dtype) / followed.spread.size


def _sum(followed: Followed, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if not over_last(followed, x, dim, "a sum"):
        return kept(followed, x, dim, keepdim, x.sum(dim, keepdim, dtype=dtype))
    return ops.sum_sum(x.sum(-1, keepdim=keepdim, dtype=dtype), followed.spread.axis)


def _var(
    followed: Followed,
    x: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    if isinstance(dim, bool):
        followed.spread.refuse("takes a variance of all dims")
    by = float(unbiased) if correction is None else correction
    if not over_last(followed, x, dim, "a variance"):
        return kept(followed, x, dim, keepdim, x.var(dim, correction=by, keepdim=keepdim))
    spread = followed.spread
    _, variance = moments(_wide(x), spread.axis, spread.sizes)
    variance = (variance * (spread.size / (spread.size - by))).to(x.dtype)
    return variance if keepdim else variance.squeeze(-1)


def _var_mean(
    followed: Followed,
    x: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    variance = _var(followed, x, dim, unbiased, keepdim, correction=correction)
    return variance, _mean(followed, x, dim, keepdim)


def _norm(
    followed: Followed, x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """The norm of the ranks' norms: no square overflows that would not in one process, and 0 has a gradient."""
    p = 2 if p in ("fro", None) else p
    if isinstance(p, str) or p <= 0:
        followed.spread.refuse(f"takes the {p} norm")
    if not over_last(followed, x, dim, "a norm"):
        return kept(followed, x, dim, keepdim, torch.linalg.vector_norm(x, p, dim, keepdim, dtype=dtype))
    own = torch.linalg.vector_norm(x, p, -1, True, dtype=dtype)
    every = ops.gather_scatter(own, followed.spread.axis, sizes=(1,) * followed.spread.axis.size)
    return torch.linalg.vector_norm(every, p, -1, keepdim)


def _normalize(followed: Followed, x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    length = _norm(followed, x, p, dim, True)
    place = followed.place(x)
    assert place is not None
    return followed.mark(x / length.clamp_min(eps), place)


_KNOWN: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    Tensor.mean: _mean,
    torch.mean: _mean,
    Tensor.sum: _sum,
    torch.sum: _sum,
    Tensor.var: _var,
    torch.var: _var,
    torch.var_mean: _var_mean,
    Tensor.norm: _norm,
    torch.norm: _norm,
    torch.linalg.vector_norm: _norm,
    torch.linalg.norm: _norm,
    F.normalize: _normalize,
}
