"""Linear layers with both feature axes cut: AxoNN's 4D algorithm (Singh et al. 2023) without its depth axis.

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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fourfold.placement.tensor import passes, siblings
from fourfold.placement.tensor.kernels import Kernels
from fourfold.wire import Axis, UsageError
from fourfold.wire.axis import axis_of
from fourfold.wire.formulas import shares


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
    rows: int | None = None,
    total: int | None = None,
    keep: bool = False,
    gathered: Tensor | None = None,
    chunks: int = 1,
    kernels: Kernels | None = None,
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
        layout: of the weights, one of `siblings.LAYOUTS`.
        overlap: compute the weights' gradients while x's gradient is summed; off, the same with a wait before: the
            bits are equal.
        rows: the sequence form: x comes cut along this dim over `output`, too, and the outputs leave cut along it over
            `contract`. What is saved for backward is this rank's part.
        total: extent of the whole along `rows`, whose first parts are one longer where it does not divide; None if it
            does.
        keep: of the sequence form: keep the gathered x until backward instead of gathering it again.
        gathered: of the sequence form, `contract` one rank, `keep` off: x of all ranks, if the caller has it anyway.
        chunks: multiplications that a product is cut into where its operand is gathered or its result summed, so that
            chunks travel while others are multiplied; 1 for none.
        kernels: chooses how matrices are multiplied; None: as they lie.

    Returns:
        For each weight [..., N], its features cut over `output`, equal on every rank of `contract` (or cut over it
        along `rows`); views of one tensor where there are several.

    Raises:
        UsageError: shapes or options do not fit.
    """
    _check(x, weights, biases, layout, chunks)
    turned = layout == "in,out"
    if contract.size == output.size == 1 and kernels is None:
        pairs = zip(weights, biases, strict=True)
        return tuple(functional.linear(x, weight.t() if turned else weight, bias) for weight, bias in pairs)
    rows, total = (None, total) if rows is None else _lines(x, rows, total, output)
    keep = keep and rows is not None and output.size > 1 and any(weight.requires_grad for weight in weights)
    sequence = (rows, total, keep, chunks, "" if kernels is None else kernels.key)
    call = passes.Call(contract.key, output.key, kind, turned, overlap, *sequence)
    out = _Product.apply(x, None if gathered is None else gathered.detach(), call, len(weights), *weights, *biases)
    return tuple(siblings.columns(out, siblings.widths(weights, turned)))


class _Product(torch.autograd.Function):
    """Both directions are registered ops, so that compiled graphs and fake tensors know them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gathered: Tensor | None, call: passes.Call, count: int, *parameters: Tensor | None
    ) -> Tensor:
        weights, biases = siblings.present(parameters[:count]), parameters[count:]
        ctx.call, ctx.count = call, count
        ctx.wanted, ctx.trained = x.requires_grad, [weight.requires_grad for weight in weights]
        ctx.biased = [bias is not None and bias.requires_grad for bias in biases]
        ctx.shapes = [weight.shape for weight in weights]
        if gathered is None:
            out, kept = passes.product(x, weights, biases, *call)
        elif call.rows is None or axis_of(call.contract).size > 1:
            raise UsageError("gathered: expected rows, and a contract of one rank")
        else:  # x has the gradient, of which `gathered` is no part
            out, kept = passes.product(gathered, weights, biases, *call._replace(rows=None, total=None))
        read = kept if call.keep else x
        ctx.save_for_backward(read if any(ctx.trained) else None, *(weights if ctx.wanted else ()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        call: passes.Call = ctx.call
        widths = [shape[1] if call.turned else shape[0] for shape in ctx.shapes]
        dx, dw, db = passes.product_gradients(*(grads[0], x, weights, widths, ctx.trained, ctx.biased), *call)
        each = siblings.dealt(
            dw, [shape if trained else None for shape, trained in zip(ctx.shapes, ctx.trained, strict=True)]
        )
        bias = siblings.dealt(db, [(n,) if biased else None for n, biased in zip(widths, ctx.biased, strict=True)])
        return dx if ctx.wanted else None, None, None, None, *each, *bias


def _lines(x: Tensor, rows: int, total: int | None, output: Axis) -> tuple[int, int]:
    """The dim along which rows are cut, from the front, and the extent of the whole along it."""
    if not -x.dim() <= rows < x.dim() or rows % x.dim() == x.dim() - 1:
        raise UsageError(
            f"rows: expected a dim of x {list(x.shape)} other than its last, which is features, found {rows}"
        )
    rows %= x.dim()
    total = x.shape[rows] * output.size if total is None else total
    expected = shares(total, output.size)[output.index]
    if x.shape[rows] != expected:
        raise UsageError(
            f"rows: of {total} along dim {rows}, rank {output.index} of {output.size} of axis {output.name} has "
            f"{expected}, found x of {list(x.shape)}; cut it by `wire.formulas.shares`, and say `total` if it is uneven"
        )
    return rows, total


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], layout: str, chunks: int) -> None:
    if chunks < 1:
        raise UsageError(f"chunks: expected at least 1, which is a product in one piece, found {chunks}")
    siblings.check(weights, biases, layout)
    for number, weight in enumerate(weights):
        if siblings.depth(weight, layout == "in,out") != x.shape[-1]:
            raise UsageError(
                f"sibling {number}: expected a weight {'[K, N]' if layout == 'in,out' else '[N, K]'} with this rank's "
                f"K = {x.shape[-1]} input features, found {list(weight.shape)}; cut it over the axis that x is cut over"
            )
