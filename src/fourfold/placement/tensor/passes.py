"""Forward and backward of `product` as registered ops, so that compiled graphs, meta and fake tensors know them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.placement.tensor import kernels, rows, siblings
from fourfold.placement.tensor.operators import register
from fourfold.placement.tensor.siblings import flat, widths
from fourfold.wire.axis import axis_of
from fourfold.wire.ops import backward_kind


class Call(NamedTuple):
    """What of a product is no tensor, as the ops take it: axes and kernels by their keys. See `product`."""

    contract: str
    output: str
    kind: str
    turned: bool
    overlap: bool
    rows: int | None
    total: int | None
    keep: bool
    chunks: int
    kernels: str


_CALL = (
    "str contract, str output, str kind, bool turned, bool overlap, "
    "int? rows, SymInt? total, bool keep, int chunks, str kernels"
)


# ---- forward


def _forward(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], *options: Any) -> tuple[Tensor, Tensor]:
    """The outputs, and the gathered input where it is to be kept."""
    call = Call(*options)
    contract, output, mm = axis_of(call.contract), axis_of(call.output), kernels.of(call.kernels)
    blocks, sizes = siblings.matrices(weights, call.turned), widths(weights, call.turned)
    width = sum(sizes)
    # The first rank's sum begins with the bias: it is added once, and costs no pass over the outputs.
    bias = siblings.bias_of(biases, sizes) if contract.index == 0 else None

    def multiply(some: Tensor, out: Tensor) -> None:
        siblings.outputs(some, blocks, out, mm, bias)

    kept = x.new_empty(0)
    if call.rows is None:
        lines, full = None, flat(x)
        out = x.new_empty(full.shape[0], width)
        rows.multiply_sum(full, out, multiply, contract, call.kind, call.chunks)
    else:
        lines = _lines(x, call)
        shard, parts, later = lines.flat(x), lines.parts(output.size), lines.parts(contract.size)
        if output.size > 1:
            partial = x.new_empty(sum(parts), width)
            full = rows.gather_multiply(shard, partial, multiply, output, parts, call.kind, call.chunks)
            kept = full if call.keep else kept
            out = rows.scattered(partial, contract, later, call.kind).wait()
        else:
            out = rows.multiply_scatter(shard, width, multiply, contract, later, call.kind, call.chunks)
    found = out.view(*x.shape[:-1], width) if lines is None else lines.tensor(out)
    return found.data, kept  # no view of `out`: autograd would forbid code to change it in place


def _forward_shapes(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], *options: Any
) -> tuple[Tensor, Tensor]:
    call = Call(*options)
    shape = [*x.shape[:-1], sum(widths(weights, call.turned))]
    kept = x.new_empty(0)
    if call.rows is not None:
        lines, contract = _lines(x, call), axis_of(call.contract)
        shape[call.rows] = rows.shares(lines.total, contract.size)[contract.index]
        if call.keep:
            kept = x.new_empty(lines.total * lines.beside, x.shape[-1])
    return x.new_empty(shape), kept


def _lines(x: Tensor, call: Call) -> rows.Lines:
    assert call.rows is not None and call.total is not None
    return rows.Lines(x.shape, call.rows, call.total)


# ---- backward


class Wanted(NamedTuple):
    """Which gradients the siblings have.

    Attributes:
        widths: output features of each.
        trained: whether its weight has one.
        biased: whether its bias has one.
    """

    widths: list[int]
    trained: list[bool]
    biased: list[bool]


def _backward(grad: Tensor, x: Tensor | None, weights: list[Tensor], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, of the weights and of the biases (both flat); of no elements where nobody wants them.

    Args:
        grad: of all outputs, side by side.
        x: what forward read, or gathered and kept; None if no weight is trained.
        weights: empty if the input has no gradient.
        options: `Wanted`, then `Call`.
    """
    wanted, call = Wanted(*options[:3]), Call(*options[3:])
    whole = _whole if call.rows is None else _cut
    return whole(grad, x, weights, wanted, call)


def _whole(
    grad: Tensor, x: Tensor | None, weights: list[Tensor], wanted: Wanted, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Every rank of `output` has all rows: the input's gradient is summed while the weights' are computed."""
    output, above, kind = axis_of(call.output), flat(grad), backward_kind(call.kind)
    dx = grad.new_empty([*grad.shape[:-1], _depth(weights, call)] if weights else 0)
    dw, db = _places(grad, x, wanted, call)
    if weights and output.size > 1:
        _input_gradient(above, weights, flat(dx), call)
        work = output.all_reduce(dx, kind)
        if not call.overlap:
            work.wait()
        # A sum among more than two ranks has a second round, which is begun when half of them are computed.
        halfway = work.proceed if output.size > 2 else None
        _parameters(above, None if x is None else flat(x), wanted, call, dw, db, halfway)
        work.wait()
    else:
        _parameters(above, None if x is None else flat(x), wanted, call, dw, db)
        if weights:
            _input_gradient(above, weights, flat(dx), call)
    return dx, dw, db


def _cut(
    grad: Tensor, x: Tensor | None, weights: list[Tensor], wanted: Wanted, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows are cut: gather the outputs' gradient, scatter the input's, and gather the input again behind both."""
    contract, output, kind = axis_of(call.contract), axis_of(call.output), backward_kind(call.kind)
    lines = _lines(grad, call)
    parts, shard = lines.parts(output.size), lines.flat(grad)
    dw, db = _places(grad, x, wanted, call)
    read, reading = x, None
    if x is not None and not call.keep:
        mine = lines.flat(x)  # belongs to the gather until it is waited for
        read, reading = rows.gathered(mine, output, parts, call.kind)
        if not call.overlap:
            reading.wait()
    leaving = None
    if weights:
        partial = grad.new_empty(sum(parts), _depth(weights, call))
        above = rows.gather_multiply(
            *(shard, partial, lambda some, out: _input_gradient(some, weights, out, call)),
            *(contract, lines.parts(contract.size), kind, call.chunks),
        )
        leaving = rows.scattered(partial, output, parts, kind)
        if not call.overlap:
            leaving.wait()
    else:
        above, work = rows.gathered(shard, contract, lines.parts(contract.size), kind)
        work.wait()
    if reading is not None:
        reading.wait()
    _parameters(above, read, wanted, call, dw, db)
    return grad.new_empty(0) if leaving is None else lines.tensor(leaving.wait()), dw, db


def _input_gradient(grad: Tensor, weights: list[Tensor], out: Tensor, call: Call) -> None:
    siblings.input_gradient(grad, siblings.matrices(weights, call.turned), out, kernels.of(call.kernels))


def _parameters(
    grad: Tensor,
    x: Tensor | None,
    wanted: Wanted,
    call: Call,
    dw: Tensor,
    db: Tensor,
    halfway: Callable[[], object] | None = None,
) -> None:
    """Fill the gradients of weights and biases; `halfway` is called when half of the weights' are computed."""
    if x is not None:
        which = siblings.Trained(wanted.widths, wanted.trained, call.turned)
        siblings.weight_gradients(grad, x, which, dw, halfway, kernels.of(call.kernels))
    if any(wanted.biased):
        places = iter(siblings.columns(db, [n for n, one in zip(wanted.widths, wanted.biased, strict=True) if one]))
        for part, one in zip(siblings.columns(grad, wanted.widths), wanted.biased, strict=True):
            if one:
                torch.sum(part, 0, out=next(places))


def _depth(weights: list[Tensor], call: Call) -> int:
    return weights[0].shape[0 if call.turned else 1]


def _places(grad: Tensor, x: Tensor | None, wanted: Wanted, call: Call) -> tuple[Tensor, Tensor]:
    """Room for the gradients of weights and biases."""
    columns = siblings.Trained(wanted.widths, wanted.trained, call.turned).columns
    dw = grad.new_empty(0 if x is None else columns * x.shape[-1])
    return dw, grad.new_empty(sum(n for n, one in zip(wanted.widths, wanted.biased, strict=True) if one))


def _backward_shapes(
    grad: Tensor, x: Tensor | None, weights: list[Tensor], *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wanted, call = Wanted(*options[:3]), Call(*options[3:])
    dx = grad.new_empty(0)
    if weights:
        shape = [*grad.shape[:-1], _depth(weights, call)]
        if call.rows is not None:
            output = axis_of(call.output)
            shape[call.rows] = rows.shares(_lines(grad, call).total, output.size)[output.index]
        dx = grad.new_empty(shape)
    return dx, *_places(grad, x, wanted, call)


# ---- registration

product = register(
    "product",
    f"(Tensor x, Tensor[] weights, Tensor?[] biases, {_CALL}) -> (Tensor, Tensor)",
    _forward,
    _forward_shapes,
    len(Call._fields),
)
product_gradients = register(
    "product_gradients",
    f"(Tensor grad, Tensor? x, Tensor[] weights, SymInt[] widths, bool[] trained, bool[] biased, {_CALL})"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_shapes,
    len(Call._fields),
)
