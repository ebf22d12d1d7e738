"""Differentiable collectives: the conjugate pairs of tensor parallelism as registered torch ops.

Forward and backward of each pair are conjugate, so that a network cut over an axis has the gradients of the whole one:

| pair         | forward              | backward | where |
|---|---|---|---|
| sum_identity | sum over the axis    | identity | partial outputs of a linear whose input features are cut |
| identity_sum | identity             | sum      | a whole tensor that every rank feeds to its own part |
| gather_cut   | gather along a dim   | own part | cut features that every rank then uses alike |
| cut_gather   | own part along a dim | gather   | a whole tensor of which each rank goes on with its part |
| sum_sum      | sum                  | sum      | a statistic of cut features that scales each rank's part |

Ops take the key of an axis, since a graph can hold strings but not axes. They have fake implementations, so that
`torch.compile` does not break its graph at them, and count their bytes once each time they run, compiled or not.
The functions here take the axis, and are the identity on an axis of one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fourfold.wire.axis import Axis, axis_of
from fourfold.wire.errors import UsageError

_library = torch.library.Library("fourfold", "FRAGMENT")


def sum_identity(x: Tensor, axis: Axis, kind: str = "activation") -> Tensor:
    """Forward: sum over the axis, in rank order. Backward: identity."""
    return x if axis.size == 1 else torch.ops.fourfold.sum_identity(x, axis.key, kind)


def identity_sum(x: Tensor, axis: Axis, kind: str = "activation") -> Tensor:
    """Forward: identity (no copy). Backward: sum over the axis. `kind` is the forward's; see `backward_kind`."""
    return x if axis.size == 1 else _IdentitySum.apply(x, axis.key, kind)


def gather_cut(x: Tensor, axis: Axis, kind: str = "activation", dim: int = -1) -> Tensor:
    """Forward: the ranks' `x` (equal shapes) concatenated along `dim`, in rank order. Backward: own part."""
    return x if axis.size == 1 else torch.ops.fourfold.gather_cut(x, axis.key, kind, dim)


def cut_gather(x: Tensor, axis: Axis, kind: str = "activation", dim: int = -1) -> Tensor:
    """Forward: own part along `dim`, which must divide by the axis. Backward: the gathered gradients."""
    return x if axis.size == 1 else torch.ops.fourfold.cut_gather(x, axis.key, kind, dim)


def sum_sum(x: Tensor, axis: Axis, kind: str = "activation") -> Tensor:
    """Forward: sum over the axis. Backward: sum over the axis."""
    return x if axis.size == 1 else torch.ops.fourfold.sum_sum(x, axis.key, kind)


def backward_kind(kind: str) -> str:
    """What the backward of traffic of this kind is counted as."""
    return "activation-gradient" if kind == "activation" else kind


class _IdentitySum(torch.autograd.Function):
    """An op may not return its input, and a copy would keep a second activation alive: so a function of ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, kind: str) -> Tensor:
        ctx.axis, ctx.kind = axis, kind
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grad_outputs
        return torch.ops.fourfold.sum_identity(grad, ctx.axis, backward_kind(ctx.kind)), None, None


# ---- what the ops do


def _sum(x: Tensor, axis: str, kind: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    axis_of(axis).all_reduce(total, kind).wait()
    return total


def _fake_sum(x: Tensor, axis: str, kind: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gather(x: Tensor, axis: str, kind: str, dim: int) -> Tensor:
    group = axis_of(axis)
    out = x.new_empty(group.size, *x.shape)
    group.all_gather(out, x.contiguous(), kind).wait()
    dim %= x.dim()
    return out.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _fake_gather(x: Tensor, axis: str, kind: str, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * axis_of(axis).size
    return x.new_empty(shape)


def _cut(x: Tensor, axis: str, kind: str, dim: int) -> Tensor:
    group = axis_of(axis)
    each = _part(x, group, dim)
    return x.narrow(dim, group.index * each, each).clone(memory_format=torch.contiguous_format)


def _fake_cut(x: Tensor, axis: str, kind: str, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = _part(x, axis_of(axis), dim)
    return x.new_empty(shape)


def _part(x: Tensor, axis: Axis, dim: int) -> int:
    each, rest = divmod(x.shape[dim], axis.size)
    if rest:
        raise UsageError(
            f"cut over axis {axis.name}: dim {dim} of a tensor of shape {tuple(x.shape)} does not divide by "
            f"{axis.size} ranks; pad it, or choose another size for the axis"
        )
    return each


# ---- registration

_WITHOUT_DIM, _WITH_DIM = (
    "(Tensor x, str axis, str kind) -> Tensor",
    "(Tensor x, str axis, str kind, int dim) -> Tensor",
)


def _register(name: str, schema: str, run: Any, fake: Any, conjugate: Any) -> None:
    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.axis, ctx.kind, *ctx.dim = inputs

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return conjugate(ctx, grad), None, None, *(None for _ in ctx.dim)

    _library.define(name + schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fourfold::{name}", fake, lib=_library)
    torch.library.register_autograd(f"fourfold::{name}", backward, setup_context=keep, lib=_library)


def _conjugate(name: str) -> Any:
    def apply(ctx: Any, grad: Tensor) -> Tensor:
        return getattr(torch.ops.fourfold, name)(grad, ctx.axis, backward_kind(ctx.kind), *ctx.dim)

    return apply


_register("sum_identity", _WITHOUT_DIM, _sum, _fake_sum, lambda ctx, grad: grad)
_register("sum_sum", _WITHOUT_DIM, _sum, _fake_sum, _conjugate("sum_sum"))
_register("gather_cut", _WITH_DIM, _gather, _fake_gather, _conjugate("cut_gather"))
_register("cut_gather", _WITH_DIM, _cut, _fake_cut, _conjugate("gather_cut"))
