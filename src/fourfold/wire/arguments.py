"""What the collectives of an axis are refused for, before anything moves. All raise `UsageError`."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from torch import Tensor

from fourfold.ledger.ledger import KINDS
from fourfold.wire.errors import UsageError

if TYPE_CHECKING:
    from fourfold.wire.axis import Axis


def kind(kind: str) -> None:
    """A kind of traffic that the ledger knows."""
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UsageError(f"kind of traffic: expected one of {', '.join(KINDS)}, found {kind!r}{hint}")


def flat(tensor: Tensor, what: str) -> Tensor:
    """A contiguous tensor, as its elements in a row."""
    if not tensor.is_contiguous():
        raise UsageError(
            f"`{what}` of shape {tuple(tensor.shape)} is not contiguous: a copy would be lost; pack it first"
        )
    return tensor.detach().view(-1)


def same_dtype(op: str, out: Tensor, inp: Tensor) -> None:
    """Two tensors of one dtype."""
    if out.dtype != inp.dtype:
        raise UsageError(f"{op}: expected both tensors in one dtype, found {out.dtype} and {inp.dtype}")


def elements(axis: Axis, op: str, what: str, tensor: Tensor, numel: int) -> None:
    """A tensor of `numel` elements."""
    if tensor.numel() != numel:
        raise UsageError(
            f"{op} on axis {axis.name}: expected `{what}` to have {numel} elements (axis of {axis.size}), "
            f"found {tensor.numel()}; if the ranks' parts are not equal, say `sizes`"
        )


def parts(axis: Axis, op: str, what: str, whole: Tensor, which: str, part: Tensor, sizes: Sequence[int]) -> None:
    """`sizes` that cut `whole` (called `what`), of which this rank's is that of `part` (called `which`)."""
    if len(sizes) != axis.size or sum(sizes) != whole.numel() or min(sizes) < 0:
        raise UsageError(
            f"{op} on axis {axis.name}: expected `sizes` of {axis.size} counts that add up to the {whole.numel()} "
            f"elements of `{what}`, found {list(sizes)}"
        )
    if part.numel() != sizes[axis.index]:
        raise UsageError(
            f"{op} on axis {axis.name}: `sizes` gives rank {axis.index} {sizes[axis.index]} elements, "
            f"but its `{which}` has {part.numel()}; give every rank the same `sizes`"
        )


def splits(axis: Axis, op: str, what: str, tensor: Tensor, given: Sequence[int] | None) -> list[int]:
    """How many elements of `tensor` belong to each rank: as given, or equally many."""
    if given is None:
        each, rest = divmod(tensor.numel(), axis.size)
        if rest:
            raise UsageError(
                f"{op} on axis {axis.name}: {tensor.numel()} elements do not divide by {axis.size} ranks; "
                f"say {what}_splits"
            )
        return [each] * axis.size
    if len(given) != axis.size or sum(given) != tensor.numel() or min(given) < 0:
        raise UsageError(
            f"{op} on axis {axis.name}: expected {what}_splits of {axis.size} counts that add up to "
            f"{tensor.numel()}, found {list(given)}"
        )
    return list(given)


def member(axis: Axis, op: str, what: str, rank: int) -> None:
    """A rank of the axis."""
    if not 0 <= rank < axis.size:
        raise UsageError(
            f"{op} on axis {axis.name}: expected `{what}` to be a rank of the axis (0 … {axis.size - 1}), found {rank}"
        )


def peer(axis: Axis, op: str, what: str, rank: int, tag: int) -> None:
    """Another rank of the axis, and a tag for messages."""
    member(axis, op, what, rank)
    if rank == axis.index:
        raise UsageError(f"{op} on axis {axis.name}: `{what}` = {rank} is this rank itself; keep the tensor instead")
    if not 0 <= tag < 1 << 30:
        raise UsageError(f"{op} on axis {axis.name}: expected a tag from 0 to {(1 << 30) - 1}, found {tag}")
