"""The matrices of sibling linears, which read the same tensor: one multiplication where their memory allows it.

Nothing here communicates. A linear is y = x B with B of [K, N]; a weight holds B ("in,out") or its transpose ("out,in",
as `torch.nn.Linear`). Outputs of siblings lie side by side in one tensor of [M, ΣN].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from fourfold.torch_private import storage_key
from fourfold.wire import UsageError

LAYOUTS = ("out,in", "in,out")
"""How a weight lies in memory: as that of `torch.nn.Linear`, or transposed (GPT-2's Conv1D)."""


class Multiply(Protocol):
    """A matrix product into a given place."""

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, start: Tensor | None = None) -> None:
        """out [m, n] = a [m, k] b [k, n], plus `start` [n] or [m, n], which may be `out` itself."""
        ...


def multiply(a: Tensor, b: Tensor, out: Tensor, start: Tensor | None = None) -> None:
    """`Multiply` by torch."""
    if start is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(start, a, b, out=out)


def check(weights: Sequence[Tensor], biases: Sequence[Tensor | None], layout: str) -> None:
    """Refuse what are no siblings.

    Raises:
        UsageError: another number of biases than of weights, a weight that is no matrix, or an unknown layout.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout of a weight: expected one of {', '.join(map(repr, LAYOUTS))}, found {layout!r}")
    if not weights or len(weights) != len(biases):
        raise UsageError(
            f"siblings: expected one bias (or None) for each weight, found {len(weights)} weights and "
            f"{len(biases)} biases"
        )
    for number, weight in enumerate(weights):
        if weight.dim() != 2:
            raise UsageError(f"sibling {number}: expected a matrix for a weight, found {list(weight.shape)}")


def flat(x: Tensor) -> Tensor:
    """[rows, features]; a view where the memory allows it."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def depth(weight: Tensor, turned: bool) -> int:
    """Input features."""
    return weight.shape[0 if turned else 1]


def widths(weights: Sequence[Tensor], turned: bool) -> list[int]:
    """Output features of each sibling."""
    return [weight.shape[1 if turned else 0] for weight in weights]


def columns(tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Each sibling's part of the last dim; the tensor itself if there is one sibling."""
    return (tensor,) if len(sizes) == 1 else tensor.split(list(sizes), -1)


def matrices(weights: Sequence[Tensor], turned: bool) -> list[Tensor]:
    """The fewest matrices [K, N] whose columns, side by side, are those of all weights: views, never copies.

    Args:
        turned: the weights lie "in,out".
    """
    if turned:
        return list(weights)
    whole = side_by_side(weights) if len(weights) > 1 else None
    return [weight.t() for weight in weights] if whole is None else [whole.t()]


def side_by_side(weights: Sequence[Tensor]) -> Tensor | None:
    """One view [ΣN, K] of weights [N, K] that follow each other without a gap in one storage, else None."""
    first = weights[0]
    storage = storage_key(first)
    end, rows = first.storage_offset(), 0
    for weight in weights:
        same = storage_key(weight) == storage and weight.dtype == first.dtype
        if not (same and weight.is_contiguous() and weight.storage_offset() == end):
            return None
        end, rows = end + weight.numel(), rows + weight.shape[0]
    width = first.shape[1]
    return first.as_strided((rows, width), (width, 1))


def outputs(
    x: Tensor, blocks: Sequence[Tensor], out: Tensor, mm: Multiply = multiply, bias: Tensor | None = None
) -> None:
    """out [M, ΣN] = x [M, K] times all blocks [K, N], plus the bias [ΣN]."""
    first = 0
    for block in blocks:
        place = slice(first, first + block.shape[1])
        mm(x, block, out[:, place], None if bias is None else bias[place])
        first += block.shape[1]


def bias_of(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Those of all siblings side by side, [ΣN], with zeros for those that have none; None if none has."""
    first = next((bias for bias in biases if bias is not None), None)
    if first is None or len(biases) == 1:
        return first
    pairs = zip(biases, sizes, strict=True)
    return torch.cat([first.new_zeros(size) if bias is None else bias for bias, size in pairs])


def input_gradient(grad: Tensor, blocks: Sequence[Tensor], out: Tensor, mm: Multiply = multiply) -> None:
    """out [M, K] = the sum over all blocks [K, N] of their columns of grad [M, ΣN] times the block transposed."""
    first = 0
    for block in blocks:
        mm(grad[:, first : first + block.shape[1]], block.t(), out, out if first else None)
        first += block.shape[1]


@dataclass(frozen=True)
class Trained:
    """Which of some siblings have a gradient, and where it lies in one flat tensor, weight after weight.

    Attributes:
        widths: output features N of each sibling.
        trained: whether each one's weight has a gradient.
        turned: weights lie "in,out".
    """

    widths: Sequence[int]
    trained: Sequence[bool]
    turned: bool

    @property
    def columns(self) -> int:
        """Output features of all that have a gradient."""
        return sum(width for width, trained in zip(self.widths, self.trained, strict=True) if trained)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(first column of the output, past the last, features of trained siblings before it), GEMM by GEMM.

        The gradients [N, K] of siblings that follow each other are one matrix; those that lie "in,out" are not.
        """
        begins = [0, *accumulate(self.widths)]
        before, at = 0, 0
        while at < len(self.widths):
            end = at + 1
            if self.trained[at]:
                while not self.turned and end < len(self.widths) and self.trained[end]:
                    end += 1
                yield begins[at], begins[end], before
                before += begins[end] - begins[at]
            at = end


def weight_gradients(
    grad: Tensor,
    x: Tensor,
    which: Trained,
    out: Tensor,
    halfway: Callable[[], object] | None = None,
    mm: Multiply = multiply,
) -> None:
    """The gradients of all trained weights, one after the other in the flat tensor `out`.

    Args:
        grad: [M, ΣN] of all siblings.
        x: [M, K], what they read.
        halfway: called when half of them are there, so that a collective under way can go on.
    """
    depth = x.shape[1]
    products = []
    for first, last, before in which.runs():
        place, above = out[before * depth : (before + last - first) * depth], grad[:, first:last]
        left, right = (x, above) if which.turned else (above, x)
        products.append((left.t(), right, place.view(left.shape[1], right.shape[1])))
    if halfway is not None and len(products) == 1:
        left, right, place = products.pop()
        products += [(some, right, part) for some, part in zip(left.chunk(2), place.chunk(2), strict=True)]
    for number, (left, right, place) in enumerate(products, start=1):
        mm(left, right, place)
        if halfway is not None and number == (len(products) + 1) // 2:
            halfway()


def present(given: Sequence[Tensor | None]) -> list[Tensor]:
    """Those that are not None."""
    return [one for one in given if one is not None]


def dealt(tensor: Tensor, shapes: Sequence[Sequence[int] | None]) -> list[Tensor | None]:
    """Views of a flat tensor in these shapes, one after the other; None where there is none."""
    found: list[Tensor | None] = []
    first = 0
    for shape in shapes:
        if shape is None:
            found.append(None)
            continue
        numel = torch.Size(shape).numel()
        found.append(tensor[first : first + numel].view(*shape))
        first += numel
    return found
