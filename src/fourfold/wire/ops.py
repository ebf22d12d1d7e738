"""Differentiable collectives: the conjugate pairs of tensor parallelism as registered torch ops.

Forward and backward of each pair are conjugate, so that a network cut over an axis has the gradients of the whole one:

| pair           | forward            | backward        | where |
|---|---|---|---|
| sum_identity   | sum over the axis  | identity        | partial outputs of a linear whose input features are cut |
| identity_sum   | identity           | sum             | a whole tensor that every rank feeds to its own part |
| gather_cut     | gather along a dim | own part        | cut features that every rank then uses alike |
| cut_gather     | own part along dim | gather          | a whole tensor of which each rank goes on with its part |
| gather_scatter | gather along a dim | own part of sum | a cut tensor that every rank feeds whole to its own part |
| scatter_gather | own part of sum    | gather          | partial outputs of which each rank goes on with a part |
| sum_sum        | sum                | sum             | a statistic of cut features that scales each rank's part |
| trade          | exchange           | exchange        | from a part of one dim to a part of another |

What this rank hands to the network (p ranks, S bytes the whole tensor, c this rank's part of it):

| what                | bytes                        | `formulas` |
|---|---|---|
| sum                 | 2 (p − 1)/p S                | `all_reduce` |
| gather              | (p − 1) c; even: (p − 1)/p S | `all_gather`, `all_gather_of_parts` |
| own part of the sum | S − c; even: (p − 1)/p S     | `reduce_scatter`, `reduce_scatter_of_parts` |
| exchange            | all of `x` but the own part  | `all_to_all` |
| identity, own part  | 0                            | |

Parts may be uneven: `sizes` are the extents of the ranks' parts along the dim (None: equal). Padding never crosses.
Along the first dim (or one that has only dims of extent 1 before it) nothing is copied around a collective; along
others one copy packs or unpacks. Sums are taken in rank order; 16-bit floats are added up in float32 and rounded once.

Ops take the key of an axis, since a graph can hold strings but not axes. They have fake implementations, so that
`torch.compile` does not break its graph at them and tensors on meta pass through, and count their bytes once each time
they run, compiled or not. On a dry axis (`wire.dry`) they count on meta and fake tensors too.
The functions here take the axis, and are the identity on an axis of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
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


def gather_cut(
    x: Tensor, axis: Axis, kind: str = "activation", dim: int = -1, sizes: Sequence[int] | None = None
) -> Tensor:
    """Forward: the ranks' `x`, alike but for `dim`, concatenated along it in rank order. Backward: own part."""
    return x if axis.size == 1 else torch.ops.fourfold.gather_cut(x, axis.key, kind, dim, sizes)


def cut_gather(
    x: Tensor, axis: Axis, kind: str = "activation", dim: int = -1, sizes: Sequence[int] | None = None
) -> Tensor:
    """Forward: own part along `dim`, which must divide by the axis if no `sizes` are said. Backward: gather."""
    return x if axis.size == 1 else torch.ops.fourfold.cut_gather(x, axis.key, kind, dim, sizes)


def gather_scatter(
    x: Tensor, axis: Axis, kind: str = "activation", dim: int = -1, sizes: Sequence[int] | None = None
) -> Tensor:
    """Forward: as `gather_cut`. Backward: own part of the sum of the ranks' gradients (a reduce-scatter)."""
    return x if axis.size == 1 else torch.ops.fourfold.gather_scatter(x, axis.key, kind, dim, sizes)


def scatter_gather(
    x: Tensor, axis: Axis, kind: str = "activation", dim: int = -1, sizes: Sequence[int] | None = None
) -> Tensor:
    """Forward: own part along `dim` of the sum over the axis (a reduce-scatter). Backward: gather."""
    return x if axis.size == 1 else torch.ops.fourfold.scatter_gather(x, axis.key, kind, dim, sizes)


def sum_sum(x: Tensor, axis: Axis, kind: str = "activation") -> Tensor:
    """Forward: sum over the axis. Backward: sum over the axis."""
    return x if axis.size == 1 else torch.ops.fourfold.sum_sum(x, axis.key, kind)


def trade(
    x: Tensor,
    axis: Axis,
    kind: str = "activation",
    *,
    cut: int,
    joined: int,
    cuts: Sequence[int],
    joins: Sequence[int],
) -> Tensor:
    """Forward: an all-to-all, from a part of the dim `joined` to a part of the dim `cut`. Backward: the way back.

    Args:
        x: all of `cut`, this rank's part of `joined`.
        cuts: what every rank gets of `cut`.
        joins: what every rank has of `joined`.
    """
    if axis.size == 1:
        return x
    cut, joined = _dim(x, axis, cut), _dim(x, axis, joined)
    return torch.ops.fourfold.trade(x, axis.key, kind, cut, joined, list(cuts), list(joins))


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


def _gather(x: Tensor, axis: str, kind: str, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Each shard goes straight to its place in a buffer of all, rank by rank; only other dims than the first move."""
    group = axis_of(axis)
    dim, sizes = _shard(x, group, dim, sizes)
    if sizes is None:
        buffer = x.new_empty(group.size, *x.shape)
        mine = buffer[group.index].copy_(x)
        group.all_gather(buffer, mine, kind).wait()
        return buffer.movedim(0, dim).flatten(dim, dim + 1).contiguous()
    shapes = [_resized(x, dim, size) for size in sizes]
    counts = [prod(shape) for shape in shapes]
    buffer = x.new_empty(sum(counts))
    mine = buffer.narrow(0, sum(counts[: group.index]), counts[group.index]).view(x.shape).copy_(x)
    group.all_gather(buffer, mine, kind, sizes=counts).wait()
    if prod(x.shape[:dim]) == 1:
        return buffer.view(_resized(x, dim, sum(sizes)))
    return torch.cat([part.view(shape) for part, shape in zip(buffer.split(counts), shapes, strict=True)], dim)


def _fake_gather(x: Tensor, axis: str, kind: str, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    group = axis_of(axis)
    dim, sizes = _shard(x, group, dim, sizes)
    return x.new_empty(_resized(x, dim, x.shape[dim] * group.size if sizes is None else sum(sizes)))


def _cut(x: Tensor, axis: str, kind: str, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    group = axis_of(axis)
    dim, each, sizes = _whole(x, group, dim, sizes)
    start = group.index * each if sizes is None else sum(sizes[: group.index])
    return x.narrow(dim, start, each).clone(memory_format=torch.contiguous_format)


def _fake_cut(x: Tensor, axis: str, kind: str, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    dim, each, _ = _whole(x, axis_of(axis), dim, sizes)
    return x.new_empty(_resized(x, dim, each))


def _scatter(x: Tensor, axis: str, kind: str, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part of what `_sum` gives. In 16 bits an exchange, on NCCL too: its own scatter adds in 16 bits."""
    group = axis_of(axis)
    dim, each, sizes = _whole(x, group, dim, sizes)
    half = x.dtype in (torch.bfloat16, torch.float16)
    out = x.new_empty(_resized(x, dim, each), dtype=torch.float32 if half else x.dtype)
    if sizes is None:
        packed = x.unflatten(dim, (group.size, each)).movedim(dim, 0).contiguous()
        group.reduce_scatter(out, packed, kind).wait()
    else:
        row = prod(_resized(x, dim, 1))
        packed = _packed(x, dim, sizes)
        group.reduce_scatter(out, packed, kind, sizes=[size * row for size in sizes]).wait()
    return out.to(x.dtype)


def _trade(x: Tensor, axis: str, kind: str, cut: int, joined: int, cuts: Sequence[int], joins: Sequence[int]) -> Tensor:
    group = axis_of(axis)
    shapes = _traded(x, group, cut, joined, cuts, joins)
    row = x.numel() // max(1, x.shape[cut])
    out = x.new_empty(sum(map(prod, shapes)))
    counts = [prod(shape) for shape in shapes]
    group.all_to_all(out, _packed(x, cut, cuts), kind, counts, [size * row for size in cuts]).wait()
    return torch.cat([part.view(shape) for part, shape in zip(out.split(counts), shapes, strict=True)], joined)


def _fake_trade(
    x: Tensor, axis: str, kind: str, cut: int, joined: int, cuts: Sequence[int], joins: Sequence[int]
) -> Tensor:
    shapes = _traded(x, axis_of(axis), cut, joined, cuts, joins)
    return x.new_empty([*shapes[0][:joined], sum(joins), *shapes[0][joined + 1 :]])


def _packed(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts of `x` along `dim`, one after the other, each contiguous: `x` itself where it lies so already."""
    if prod(x.shape[:dim]) == 1:
        return x.contiguous()
    packed = x.new_empty(x.numel())
    parts = x.split(list(sizes), dim)
    for part, place in zip(parts, packed.split([part.numel() for part in parts]), strict=True):
        place.view(part.shape).copy_(part)
    return packed


# ---- shapes


def _shard(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None) -> tuple[int, Sequence[int] | None]:
    """The dim from the front, and the sizes, or None where they are equal; checked against this rank's part."""
    dim = _dim(x, axis, dim)
    if sizes is None:
        return dim, None
    _count(x, axis, dim, sizes)
    if x.shape[dim] != sizes[axis.index]:
        raise UsageError(
            f"gather over axis {axis.name}: `sizes` gives rank {axis.index} an extent of {sizes[axis.index]} in dim "
            f"{dim}, but its part has shape {tuple(x.shape)}"
        )
    return dim, _uneven(sizes)


def _whole(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None) -> tuple[int, int, Sequence[int] | None]:
    """The dim from the front, the extent of this rank's part, and the sizes, or None where they are equal."""
    front = _dim(x, axis, dim)
    if sizes is not None:
        _count(x, axis, dim, sizes)
        if sum(sizes) != x.shape[dim]:
            raise UsageError(
                f"cut over axis {axis.name}: expected `sizes` that add up to dim {dim} of a tensor of shape "
                f"{tuple(x.shape)}, found {list(sizes)}"
            )
        return front, sizes[axis.index], _uneven(sizes)
    if x.shape[dim] % axis.size:  # no divmod: a compiler's symbolic sizes do not know it
        raise UsageError(
            f"cut over axis {axis.name}: dim {dim} of a tensor of shape {tuple(x.shape)} does not divide by "
            f"{axis.size} ranks; say `sizes`, or choose another size for the axis"
        )
    return front, x.shape[dim] // axis.size, None


def _traded(x: Tensor, axis: Axis, cut: int, joined: int, cuts: Sequence[int], joins: Sequence[int]) -> list[list[int]]:
    """Shapes of what comes from every rank."""
    _whole(x, axis, cut, cuts)
    _shard(x, axis, joined, joins)
    if cut == joined:
        raise UsageError(f"trade over axis {axis.name}: expected two dims, found {cut} twice")
    shape = _resized(x, cut, cuts[axis.index])
    return [[*shape[:joined], size, *shape[joined + 1 :]] for size in joins]


def _dim(x: Tensor, axis: Axis, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise UsageError(f"gather or cut over axis {axis.name}: a tensor of shape {tuple(x.shape)} has no dim {dim}")
    return dim % x.dim()


def _count(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> None:
    if len(sizes) != axis.size or min(sizes) < 0:
        raise UsageError(
            f"gather or cut over axis {axis.name}, dim {dim} of a tensor of shape {tuple(x.shape)}: expected `sizes` "
            f"of {axis.size} extents, found {list(sizes)}"
        )


def _uneven(sizes: Sequence[int]) -> Sequence[int] | None:
    return None if min(sizes) == max(sizes) else sizes


def _resized(x: Tensor, dim: int, extent: int) -> list[int]:
    return [*x.shape[:dim], extent, *x.shape[dim + 1 :]]


# ---- registration

_WITHOUT_DIM, _WITH_DIM, _WITH_DIMS = (
    "(Tensor x, str axis, str kind) -> Tensor",
    "(Tensor x, str axis, str kind, int dim, int[]? sizes=None) -> Tensor",
    "(Tensor x, str axis, str kind, int cut, int joined, int[] cuts, int[] joins) -> Tensor",
)


def _register(name: str, schema: str, run: Any, fake: Any, conjugate: Any) -> None:
    def shapes(x: Tensor, axis: str, *more: Any) -> Tensor:
        """On meta and on fake tensors. A compiler looks at shapes several times a trace, which is no run."""
        dry = axis_of(axis).dry and not torch.compiler.is_compiling()
        return run(x, axis, *more) if dry else fake(x, axis, *more)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.axis, ctx.kind, *ctx.dim = inputs

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return conjugate(ctx, grad), None, None, *(None for _ in ctx.dim)

    _library.define(name + schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fourfold::{name}", shapes, lib=_library)
    torch.library.register_autograd(f"fourfold::{name}", backward, setup_context=keep, lib=_library)


def _conjugate(name: str) -> Any:
    def apply(ctx: Any, grad: Tensor) -> Tensor:
        return getattr(torch.ops.fourfold, name)(grad, ctx.axis, backward_kind(ctx.kind), *ctx.dim)

    return apply


def _traded_back(ctx: Any, grad: Tensor) -> Tensor:
    cut, joined, cuts, joins = ctx.dim
    return torch.ops.fourfold.trade(grad, ctx.axis, backward_kind(ctx.kind), joined, cut, joins, cuts)


_register("sum_identity", _WITHOUT_DIM, _sum, _fake_sum, lambda ctx, grad: grad)
_register("sum_sum", _WITHOUT_DIM, _sum, _fake_sum, _conjugate("sum_sum"))
_register("gather_cut", _WITH_DIM, _gather, _fake_gather, _conjugate("cut_gather"))
_register("cut_gather", _WITH_DIM, _cut, _fake_cut, _conjugate("gather_cut"))
_register("gather_scatter", _WITH_DIM, _gather, _fake_gather, _conjugate("scatter_gather"))
_register("scatter_gather", _WITH_DIM, _scatter, _fake_cut, _conjugate("gather_scatter"))
_register("trade", _WITH_DIMS, _trade, _fake_trade, _traded_back)
