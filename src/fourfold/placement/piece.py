"""The box of a logical tensor that a rank holds, and where it lies in the rank's flat shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """One box.

    Attributes:
        name: logical parameter name, as one process would see it.
        shape: logical shape of the whole parameter.
        offsets: where the box begins, per dim of the logical shape.
        sizes: extent of the box, per dim; a zero extent is an empty box (more ranks than rows).
        start: index in the flat shard of the box's first element.
        strides: of the box in the flat shard. A box is contiguous from `start`, unless it is one of several that lie
            side by side in its rows.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.sizes)

    def of(self, flat: Tensor) -> Tensor:
        """The box [sizes] in a flat shard, a view."""
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.start)


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes that flat elements [first, last) of a row-major tensor are, in order.

    Whole rows are one box. A range that begins or ends inside a row has boxes of that row beside them: at most two a
    dim and one more. An empty range is one empty box, of a tensor without dims none.
    """
    if not shape:
        if last > first:
            yield (), ()
        return
    width = prod(shape[1:])
    if last <= first:
        yield (shape[0], *(0 for _ in shape[1:])), (0, *shape[1:])
        return
    begin, end = -(-first // width), last // width
    if begin > end:
        yield from _inside(shape, end, first, last)
        return
    if first < begin * width:
        yield from _inside(shape, begin - 1, first, begin * width)
    if begin < end:
        yield (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])
    if end * width < last:
        yield from _inside(shape, end, end * width, last)


def _inside(shape: Sequence[int], row: int, first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of a range that lies in one row."""
    start = row * prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], first - start, last - start):
        yield (row, *offsets), (1, *sizes)
