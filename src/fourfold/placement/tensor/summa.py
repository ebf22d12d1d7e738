"""Linear layers on a grid that cuts rows and features of everything: SUMMA (van de Geijn and Watts 1997).

Optimus (Xu et al. 2021) trains transformers on it, and Tesseract (Wang et al. 2021) on several such grids, each with
its own rows of the batch: the sum of gradients over those is the data axis' business.

| tensor             | along `rows` | along `features` |
|---|---|---|
| x [M, K], gradient | M            | K                |
| weight [K, N]      | K            | N                |
| output [M, N]      | M            | N                |

The features K that are summed over are cut into *panels*, each of which one rank of every line owns. Step by step a
panel of x is broadcast along `features` and one of the weight along `rows`; every rank adds their product up. Backward
runs through the panels again: a panel of dx = dout Wᵀ is summed along `features` to its owner, one of dW = xᵀ dout
along `rows`. What the next step needs is under way while a step multiplies, and so are its sums: at most two panels of
each are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fourfold.placement.tensor import kernels, siblings
from fourfold.placement.tensor.kernels import Kernels
from fourfold.placement.tensor.operators import register
from fourfold.placement.tensor.panels import Panel, panels
from fourfold.placement.tensor.siblings import Multiply, dealt, flat, present, widths
from fourfold.wire import Axis, UsageError, Work, ops
from fourfold.wire.axis import axis_of
from fourfold.wire.formulas import shares
from fourfold.wire.ops import backward_kind


def summa(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    rows: Axis,
    features: Axis,
    total: int | None = None,
    kind: str = "activation",
    layout: str = "out,in",
    overlap: bool = True,
    kernels: Kernels | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of sibling linears, which all read `x`: one broadcast of x for all.

    Args:
        x: [..., K], its rows cut over `rows`, its features over `features`.
        weights: each [N, K] ("out,in") or [K, N] ("in,out"): this rank's block, K cut over `rows`, N over `features`.
        biases: each [N] (cut over `features`, equal over `rows`) or None; their gradients are summed over `rows`.
        rows, features: the two axes of the grid; of any sizes, equal ones send least.
        total: the input features of the whole layer, cut over either axis as `wire.formulas.shares` says; None if they
            divide by both.
        kind: of the traffic of x in forward.
        layout: of the weights.
        overlap: broadcasts and sums travel while a step multiplies; off, the same with a wait at once: the bits are
            equal.
        kernels: chooses how matrices are multiplied; None: as they lie.

    Returns:
        For each weight [..., N], cut as x is; views of one tensor where there are several.

    Raises:
        UsageError: shapes or layout do not fit.
    """
    siblings.check(weights, biases, layout)
    turned = layout == "in,out"
    if rows.size == features.size == 1:
        pairs = zip(weights, biases, strict=True)
        return tuple(functional.linear(x, weight.t() if turned else weight, bias) for weight, bias in pairs)
    total = x.shape[-1] * features.size if total is None else total
    _check_total(x, weights, turned, rows, features, total)
    call = _Call(rows.key, features.key, kind, turned, overlap, total, "" if kernels is None else kernels.key)
    out = _Summa.apply(x, call, *weights)
    sizes = widths(weights, turned)
    found = tuple(siblings.columns(out, sizes))
    own = present(biases)
    if not own:
        return found
    added = iter(ops.identity_sum(torch.cat(own), rows, "gradient").split([len(bias) for bias in own]))
    return tuple(one if bias is None else one + next(added) for one, bias in zip(found, biases, strict=True))


class _Call(NamedTuple):
    """What of a call is no tensor, as the ops take it: axes by their keys."""

    rows: str
    features: str
    kind: str
    turned: bool
    overlap: bool
    total: int
    kernels: str


class _Summa(torch.autograd.Function):
    """Both directions are registered ops, so that compiled graphs and fake tensors know them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, *weights: Tensor) -> Tensor:
        ctx.call, ctx.wanted = call, x.requires_grad
        ctx.trained = [weight.requires_grad for weight in weights]
        ctx.shapes = [weight.shape for weight in weights]
        ctx.save_for_backward(x if any(ctx.trained) else None, *(weights if ctx.wanted else ()))
        return torch.ops.fourfold.summa(x, weights, *call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        call: _Call = ctx.call
        sizes = [shape[1] if call.turned else shape[0] for shape in ctx.shapes]
        dx, dw = torch.ops.fourfold.summa_gradients(grads[0], x, weights, sizes, ctx.trained, *call)
        each = dealt(dw, [shape if trained else None for shape, trained in zip(ctx.shapes, ctx.trained, strict=True)])
        return dx if ctx.wanted else None, None, *each


def _check_total(x: Tensor, weights: Sequence[Tensor], turned: bool, rows: Axis, features: Axis, total: int) -> None:
    for what, found, axis in [
        ("x", x.shape[-1], features),
        *((f"sibling {n}", siblings.depth(weight, turned), rows) for n, weight in enumerate(weights)),
    ]:
        expected = shares(total, axis.size)[axis.index]
        if found != expected:
            raise UsageError(
                f"{what}: of {total} input features, rank {axis.index} of {axis.size} of axis {axis.name} has "
                f"{expected}, found {found}; cut them by `wire.formulas.shares`, and say `total` if they do not "
                "divide by both axes"
            )


# ---- what the ops do


@dataclass
class _Step:
    """A panel's operands, on every rank of their lines when the works are waited for.

    Attributes:
        left: [M, width] of x, or None where it is not needed.
        right: [width, N] of the weights, or None.
    """

    panel: Panel
    left: Tensor | None
    right: Tensor | None
    works: list[Work]

    def wait(self) -> None:
        """The operands are here."""
        for work in self.works:
            work.wait()


def _steps(
    x: Tensor | None, weights: Sequence[Tensor], count: int, sizes: Sequence[int], call: _Call
) -> Iterator[_Step]:
    """The panels' operands, one after the other, each with the next one's broadcasts under way.

    Args:
        x: [M, K], or None: no panels of it.
        weights: empty: no panels of them.
        count: rows M.
        sizes: output features of each weight.
    """
    rows, features = axis_of(call.rows), axis_of(call.features)

    def begin(panel: Panel) -> _Step:
        step = _Step(panel, None, None, [])
        if x is not None:
            mine = features.index == panel.left
            step.left = x[:, panel.inputs].contiguous() if mine else x.new_empty(count, panel.width)
            step.works.append(features.broadcast(step.left, panel.left, call.kind))
        if weights:
            mine = rows.index == panel.right
            step.right, buffer = _right(weights, panel, sum(sizes), mine, call.turned)
            step.works.append(rows.broadcast(buffer, panel.right, "weight"))
        if not call.overlap:
            step.wait()
        return step

    every = panels(call.total, rows.size, features.size)
    coming = begin(every[0]) if every else None
    for number in range(len(every)):
        assert coming is not None
        step, coming = coming, begin(every[number + 1]) if number + 1 < len(every) else None
        step.wait()
        yield step


def _right(weights: Sequence[Tensor], panel: Panel, width: int, mine: bool, turned: bool) -> tuple[Tensor, Tensor]:
    """A panel [features, N] of all weights side by side, and the contiguous memory that it lies in."""
    if not mine:
        shape = (panel.width, width) if turned else (width, panel.width)
        buffer = weights[0].new_empty(shape)
    elif turned:
        buffer = _joined([weight[panel.weights] for weight in weights], 1)
    else:
        whole = siblings.side_by_side(weights)
        buffer = _joined([weight[:, panel.weights] for weight in (weights if whole is None else [whole])], 0)
    return buffer if turned else buffer.t(), buffer


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), dim)


def _forward(x: Tensor, weights: list[Tensor], *options: Any) -> Tensor:
    call, sizes, matrix = _Call(*options), widths(weights, options[3]), flat(x)
    out, mm = x.new_zeros(matrix.shape[0], sum(sizes)), kernels.of(call.kernels)
    for step in _steps(matrix, weights, matrix.shape[0], sizes, call):
        assert step.left is not None and step.right is not None
        mm(step.left, step.right, out, out)
    return out.view(*x.shape[:-1], out.shape[1])


def _forward_shapes(x: Tensor, weights: list[Tensor], *options: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(widths(weights, options[3])))


def _times(a: Tensor, b: Tensor, mm: Multiply) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    mm(a, b, out)
    return out


class _Leaving:
    """Sums to one rank of a line: at most one panel's are under way while the next is multiplied."""

    def __init__(self, overlap: bool) -> None:
        self._overlap = overlap
        self._under_way: list[tuple[Work, Callable[[], object]]] = []

    def settle(self) -> None:
        """All sums are where they belong."""
        for work, place in self._under_way:
            work.wait()
            place()
        self._under_way.clear()

    def add(self, part: Tensor, to: int, axis: Axis, kind: str, place: Callable[[Tensor], object]) -> None:
        """Sum `part` at rank `to` of the axis, which puts it in its place."""
        work = axis.reduce(part, to, kind)
        self._under_way.append((work, lambda: place(part) if axis.index == to else None))
        if not self._overlap:
            self.settle()


def _backward(
    grad: Tensor, x: Tensor | None, weights: list[Tensor], sizes: list[int], trained: list[bool], *options: Any
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of all trained weights (flat); of no elements where nobody wants them."""
    call, above = _Call(*options), flat(grad)
    rows, features = axis_of(call.rows), axis_of(call.features)
    dx, dw = _backward_shapes(grad, x, weights, sizes, trained, *options)
    chosen = present([part if one else None for part, one in zip(siblings.columns(above, sizes), trained, strict=True)])
    trainable = above if all(trained) else _joined(chosen, 1) if chosen else above
    place = _Places(dw, [n for n, one in zip(sizes, trained, strict=True) if one], call.turned)
    leaving, mm = _Leaving(call.overlap), kernels.of(call.kernels)
    for step in _steps(None if x is None else flat(x), weights, above.shape[0], sizes, call):
        panel = step.panel
        inputs = None if step.right is None else _times(above, step.right.t(), mm)
        parts = None if step.left is None else place.product(trainable, step.left, mm)
        leaving.settle()
        if inputs is not None:
            leaving.add(inputs, panel.left, features, backward_kind(call.kind), flat(dx)[:, panel.inputs].copy_)
        if parts is not None:
            leaving.add(parts, panel.right, rows, "gradient", lambda part, at=panel.weights: place.put(part, at))
    leaving.settle()
    return dx, dw


@dataclass(frozen=True)
class _Places:
    """Where a panel of the weights' gradients goes.

    Attributes:
        flat: the gradients of all trained weights, one after the other.
        sizes: output features of each.
        turned: they lie "in,out".
    """

    flat: Tensor
    sizes: Sequence[int]
    turned: bool

    def product(self, grad: Tensor, x: Tensor, mm: Multiply) -> Tensor:
        """One panel, as the weights lie: x [M, width], grad [M, N]."""
        return _times(x.t(), grad, mm) if self.turned else _times(grad.t(), x, mm)

    def put(self, part: Tensor, at: slice) -> None:
        """A panel of the weights' features `at`."""
        width = sum(self.sizes)
        if width == 0:
            return
        depth = self.flat.numel() // width
        if not self.turned:
            self.flat.view(width, depth)[:, at] = part
            return
        places = self.flat.split([n * depth for n in self.sizes])
        for whole, columns in zip(places, part.split(list(self.sizes), 1), strict=True):
            whole.view(depth, columns.shape[1])[at] = columns


def _backward_shapes(
    grad: Tensor, x: Tensor | None, weights: list[Tensor], sizes: list[int], trained: list[bool], *options: Any
) -> tuple[Tensor, Tensor]:
    call = _Call(*options)
    rows, features = axis_of(call.rows), axis_of(call.features)
    dx = grad.new_empty([*grad.shape[:-1], shares(call.total, features.size)[features.index]] if weights else 0)
    columns = sum(n for n, one in zip(sizes, trained, strict=True) if one)
    dw = grad.new_empty(0 if x is None else columns * shares(call.total, rows.size)[rows.index])
    return dx, dw


_CALL = "str rows, str features, str kind, bool turned, bool overlap, SymInt total, str kernels"
register("summa", f"(Tensor x, Tensor[] weights, {_CALL}) -> Tensor", _forward, _forward_shapes, len(_Call._fields))
register(
    "summa_gradients",
    f"(Tensor grad, Tensor? x, Tensor[] weights, SymInt[] sizes, bool[] trained, {_CALL}) -> (Tensor, Tensor)",
    _backward,
    _backward_shapes,
    len(_Call._fields),
)
