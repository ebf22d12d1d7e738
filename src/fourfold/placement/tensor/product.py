"""Linear layers with both feature axes cut: AxoNN's 4D algorithm (Singh et al. 2024, section V) without its depth axis.

The z axis is not seen here: a block's arena gathers whole local weights over it, and scatters their gradients. A normal
layer has its input features over x and its output features over y, a transposed one the other way round, so what a
normal layer gives is what a transposed one takes. With an x of one rank these are Megatron's column and row parallel
linears (Shoeybi et al. 2019).

| pass     | what                                      | over       |
|---|---|---|
| forward  | out = sum of x Wᵀ, plus the bias once     | `contract` |
| backward | dx = sum of dout W, while dW is computed  | `output`   |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fourfold.placement.tensor import siblings
from fourfold.wire import Axis, UsageError
from fourfold.wire.axis import axis_of
from fourfold.wire.ops import backward_kind

LAYOUTS = ("out,in", "in,out")
"""How a weight lies in memory: as that of `torch.nn.Linear`, or transposed (GPT-2's Conv1D)."""


def product(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    contract: Axis,
    output: Axis,
    kind: str = "activation",
    layout: str = "out,in",
    overlap: bool = True,
) -> tuple[Tensor, ...]:
    """The outputs of sibling linears, which all read `x`: one message in forward, one in backward.

    One multiplication for all where the weights lie side by side in memory. Nothing is computed, kept or sent for
    gradients that nobody needs; which are needed must be the same on every rank of both axes.

    Args:
        x: [..., K], its features cut over `contract`; equal on every rank of `output`.
        weights: each [N, K] ("out,in") or [K, N] ("in,out"): this rank's block, K as in x, N cut over `output`.
        biases: each [N] (cut over `output`, equal over `contract`) or None.
        contract: outputs are summed over it.
        output: the gradient of x is summed over it.
        kind: of the forward's traffic; the backward's is `wire.ops.backward_kind` of it.
        layout: of the weights, one of `LAYOUTS`.
        overlap: compute the weights' gradients while x's gradient is summed; off, the same with a wait before: the
            bits are equal.

    Returns:
        For each weight [..., N], its features cut over `output`, equal on every rank of `contract`; views of one
        tensor where there are several.

    Raises:
        UsageError: shapes or layout do not fit.
    """
    _check(x, weights, biases, layout)
    turned = layout == "in,out"
    if contract.size == output.size == 1:
        pairs = zip(weights, biases, strict=True)
        return tuple(functional.linear(x, weight.t() if turned else weight, bias) for weight, bias in pairs)
    call = _Call(contract.key, output.key, kind, turned, overlap)
    out = _Product.apply(x, call, len(weights), *weights, *biases)
    widths = _widths(weights, turned)
    return (out,) if len(widths) == 1 else torch.split(out, widths, dim=-1)


class _Call(NamedTuple):
    """What of a call is no tensor, as the ops take it: axes by their keys."""

    contract: str
    output: str
    kind: str
    turned: bool
    overlap: bool


class _Product(torch.autograd.Function):
    """Both directions are registered ops, so that compiled graphs and fake tensors know them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, count: int, *parameters: Tensor | None) -> Tensor:
        weights, biases = _weights(parameters[:count]), parameters[count:]
        ctx.call, ctx.count = call, count
        ctx.wanted, ctx.trained = x.requires_grad, [weight.requires_grad for weight in weights]
        ctx.biased = [bias is not None and bias.requires_grad for bias in biases]
        ctx.shapes = [weight.shape for weight in weights]
        ctx.save_for_backward(x if any(ctx.trained) else None, *(weights if ctx.wanted else ()))
        return torch.ops.fourfold.product(x, weights, biases, call.contract, call.kind, call.turned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        call: _Call = ctx.call
        widths = [shape[1] if call.turned else shape[0] for shape in ctx.shapes]
        dx, dw, db = torch.ops.fourfold.product_gradients(
            *(grads[0], x, weights, widths, ctx.trained, ctx.biased),
            *(call.output, backward_kind(call.kind), call.turned, call.overlap),
        )
        each = _dealt(dw, [shape if trained else None for shape, trained in zip(ctx.shapes, ctx.trained, strict=True)])
        bias = _dealt(db, [(n,) if biased else None for n, biased in zip(widths, ctx.biased, strict=True)])
        return dx if ctx.wanted else None, None, None, *each, *bias


def _weights(given: Sequence[Tensor | None]) -> list[Tensor]:
    return [weight for weight in given if weight is not None]


def _dealt(flat: Tensor, shapes: Sequence[Sequence[int] | None]) -> list[Tensor | None]:
    """Views of a flat tensor in these shapes, one after the other; None where there is none."""
    found: list[Tensor | None] = []
    first = 0
    for shape in shapes:
        if shape is None:
            found.append(None)
            continue
        numel = torch.Size(shape).numel()
        found.append(flat[first : first + numel].view(*shape))
        first += numel
    return found


def _widths(weights: Sequence[Tensor], turned: bool) -> list[int]:
    return [weight.shape[1] if turned else weight.shape[0] for weight in weights]


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], layout: str) -> None:
    if layout not in LAYOUTS:
        raise UsageError(f"layout of a weight: expected one of {', '.join(map(repr, LAYOUTS))}, found {layout!r}")
    if not weights or len(weights) != len(biases):
        raise UsageError(
            f"siblings: expected one bias (or None) for each weight, found {len(weights)} weights and "
            f"{len(biases)} biases"
        )
    for number, weight in enumerate(weights):
        depth = weight.shape[0 if layout == "in,out" else -1]
        if weight.dim() != 2 or depth != x.shape[-1]:
            raise UsageError(
                f"sibling {number}: expected a weight {'[K, N]' if layout == 'in,out' else '[N, K]'} with this rank's "
                f"K = {x.shape[-1]} input features, found {list(weight.shape)}; cut it over the axis that x is cut over"
            )


# ---- what the ops do


def _flat(x: Tensor) -> Tensor:
    """[rows, features]; a view where the memory allows it."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _run(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], contract: str, kind: str, turned: bool
) -> Tensor:
    axis, widths = axis_of(contract), _widths(weights, turned)
    flat = _flat(x)
    out = x.new_empty(flat.shape[0], sum(widths))
    siblings.outputs(flat, siblings.matrices(weights, turned), out)
    axis.all_reduce(out, kind).wait()
    for part, bias in zip(out.split(widths, -1), biases, strict=True):
        if bias is not None:
            part.add_(bias)
    return out.view(*x.shape[:-1], out.shape[-1])


def _fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], contract: str, kind: str, turned: bool
) -> Tensor:
    out = x.new_empty(*x.shape[:-1], sum(_widths(weights, turned)))
    _count(axis_of(contract), out, kind)
    return out


def _count(axis: Axis, tensor: Tensor, kind: str) -> None:
    """On a dry axis shapes alone count their bytes, too. A compiler looks at shapes several times, which is no run."""
    if axis.dry and not torch.compiler.is_compiling():
        axis.all_reduce(tensor, kind).wait()


def _gradients(
    grad: Tensor,
    x: Tensor | None,
    weights: list[Tensor],
    widths: list[int],
    trained: list[bool],
    biased: list[bool],
    output: str,
    kind: str,
    turned: bool,
    overlap: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    axis, flat = axis_of(output), _flat(grad)
    dx, dw, db = _places(grad, x, weights, widths, trained, biased, turned)
    work = None

    def input_gradient() -> None:
        siblings.input_gradient(flat, siblings.matrices(weights, turned), _flat(dx))

    if weights and axis.size > 1:
        input_gradient()
        work = axis.all_reduce(dx, kind)
        if not overlap:
            work.wait()
    if x is not None:
        # The sum among more than two ranks has a second round, which a call between two halves starts.
        which = siblings.Trained(widths, trained, turned)
        pieces = 2 if axis.size > 2 and weights else 1
        dw = siblings.weight_gradients(flat, _flat(x), which, axis.advance, pieces)
    if db.numel():
        parts = [part for part, one in zip(flat.split(widths, -1), biased, strict=True) if one]
        torch.cat([part.sum(0) for part in parts], out=db)
    if work is not None:
        work.wait()
    elif weights:
        input_gradient()
    return dx, dw, db


def _fake_gradients(
    grad: Tensor,
    x: Tensor | None,
    weights: list[Tensor],
    widths: list[int],
    trained: list[bool],
    biased: list[bool],
    output: str,
    kind: str,
    turned: bool,
    overlap: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = _places(grad, x, weights, widths, trained, biased, turned)
    if weights:
        _count(axis_of(output), dx, kind)
    return dx, dw, db


def _places(
    grad: Tensor,
    x: Tensor | None,
    weights: list[Tensor],
    widths: list[int],
    trained: list[bool],
    biased: list[bool],
    turned: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for every gradient; of no elements where it is not needed."""
    dx = grad.new_empty(0)
    if weights:
        dx = grad.new_empty(*grad.shape[:-1], weights[0].shape[0 if turned else 1])
    columns = siblings.Trained(widths, trained, turned).columns
    dw = grad.new_empty(0 if x is None else columns * x.shape[-1])
    db = grad.new_empty(sum(n for n, one in zip(widths, biased, strict=True) if one))
    return dx, dw, db


_library = torch.library.Library("fourfold", "FRAGMENT")
_library.define("product(Tensor x, Tensor[] weights, Tensor?[] biases, str contract, str kind, bool turned) -> Tensor")
_library.impl("product", _run, "CompositeExplicitAutograd")
torch.library.register_fake("fourfold::product", _fake, lib=_library)
_library.define(
    "product_gradients(Tensor grad, Tensor? x, Tensor[] weights, int[] widths, bool[] trained, bool[] biased, "
    "str output, str kind, bool turned, bool overlap) -> (Tensor, Tensor, Tensor)"
)
_library.impl("product_gradients", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("fourfold::product_gradients", _fake_gradients, lib=_library)
