"""How a logical weight is cut over the axes of a tensor grid, and the block of it that one rank holds.

A dim is dealt over one axis in whole *units* (a head's features stay together) and as evenly as can be: the first ranks
get one more. What lies packed side by side in a dim (q|k|v) is dealt part by part, so a rank's block may consist of
several boxes. All of it is arithmetic on shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fourfold.placement.piece import boxes

CHUNK = 1 << 20
"""Elements read at a time."""

Fill = Callable[[str, int, int, torch.dtype], Tensor]
"""`fill(name, start, stop, dtype)`: flat elements [start, stop) of a logical weight."""


@runtime_checkable
class Boxes(Protocol):
    """A `Fill` that gives boxes as well: of a weight that is cut by columns, nothing beside them is read."""

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The box [sizes] of the logical weight `name`, on the host."""
        ...


class Share(NamedTuple):
    """How one dim is dealt over an axis.

    Attributes:
        axis: of the mesh.
        runs: by index on the axis, the logical indices that the rank holds, in the order in which it holds them.
    """

    axis: str
    runs: tuple[tuple[range, ...], ...]

    @property
    def copies(self) -> int:
        """How many neighbours on the axis hold the same indices."""
        return sum(runs == self.runs[0] for runs in self.runs)

    def extent(self, index: int) -> int:
        """How many indices the rank holds."""
        return sum(map(len, self.runs[index]))


def deal(count: int, ranks: int, index: int) -> range:
    """The units that rank `index` gets of `count`: neighbours, the first ranks one more."""
    each, more = divmod(count, ranks)
    first = index * each + min(index, more)
    return range(first, first + each + (index < more))


@dataclass(frozen=True)
class Cut:
    """How a weight is cut.

    Attributes:
        shape: logical.
        shares: of each dim; None: every rank holds all of it.
    """

    shape: tuple[int, ...]
    shares: tuple[Share | None, ...]

    def at(self, coordinates: Mapping[str, int]) -> Block:
        """What the rank at these coordinates holds."""
        runs = tuple(
            (range(size),) if share is None else share.runs[coordinates[share.axis]]
            for size, share in zip(self.shape, self.shares, strict=True)
        )
        dealt = {share.axis: share for share in self.shares if share is not None}
        first = {axis: 0 if axis not in dealt else _first(dealt[axis], at) for axis, at in coordinates.items()}
        owned = all(first[axis] == at if axis in dealt else at == 0 for axis, at in coordinates.items())
        return Block(self.shape, runs, owned)


def _first(share: Share, index: int) -> int:
    """The first rank of the axis that holds what rank `index` holds."""
    return share.runs.index(share.runs[index])


class Part(NamedTuple):
    """A box of the logical weight inside a rank's block.

    Attributes:
        offsets, sizes: in the logical weight.
        start, strides: of its elements in the flat block.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    strides: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """The box [sizes] in the flat block, a view."""
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.start)


@dataclass(frozen=True)
class Block:
    """The part of a logical weight that a rank computes with.

    Attributes:
        logical: shape of the whole weight.
        runs: along each dim, the logical indices that the rank holds, in order.
        owned: no rank before this one on x or y holds the same: it counts the block's elements, and writes them.
    """

    logical: tuple[int, ...]
    runs: tuple[tuple[range, ...], ...]
    owned: bool = True

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Block:
        """All of it."""
        return cls(tuple(shape), tuple((range(size),) for size in shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The block's own shape."""
        return tuple(sum(map(len, runs)) for runs in self.runs)

    @cached_property
    def is_whole(self) -> bool:
        """Every element is in it, in the logical order."""
        return all(runs == (range(size),) for runs, size in zip(self.runs, self.logical, strict=True))

    def parts(self, first: int, last: int) -> Iterator[Part]:
        """The boxes that the flat elements [first, last) of the block are; an empty range is one empty box."""
        start = first
        for offsets, sizes in boxes(self.shape, first, last):
            strides = tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
            along = [list(_pieces(*dim)) for dim in zip(self.runs, offsets, sizes, strict=True)]
            for chosen in product(*along):
                shift = sum(local * stride for (_, local, _), stride in zip(chosen, strides, strict=True))
                yield Part(
                    tuple(at for at, _, _ in chosen), tuple(size for _, _, size in chosen), start + shift, strides
                )
            start += prod(sizes)

    def take(self, whole: Tensor) -> Tensor:
        """The block of a tensor in the logical shape (a view where the block is one box)."""
        for dim, runs in enumerate(self.runs):
            if len(runs) == 1:
                whole = whole.narrow(dim, runs[0].start, len(runs[0]))
            else:
                whole = torch.cat([whole.narrow(dim, run.start, len(run)) for run in runs], dim)
        return whole

    def put(self, whole: Tensor, block: Tensor) -> None:
        """Write the block to its place in a tensor of the logical shape."""
        flat = block.reshape(-1)
        for part in self.parts(0, block.numel()):
            _box(whole, part.offsets, part.sizes).copy_(part.of(flat))

    def read(self, fill: Fill, name: str, first: int, target: Tensor, dtype: torch.dtype) -> None:
        """Set `target` [n] to flat elements [first, first + n) of the block, read as `dtype`.

        At most `CHUNK` elements are asked for at a time: nothing else is held beside the target.
        """
        for part in self.parts(first, first + target.numel()):
            values = part._replace(start=part.start - first).of(target)
            for offsets, sizes, chunk in _chunks(fill, name, self.logical, part, dtype):
                _box(values, offsets, sizes).copy_(chunk)


def _pieces(runs: tuple[range, ...], offset: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(logical index, distance from `offset`, length) of the runs inside the local range [offset, offset + size)."""
    if size == 0:
        yield runs[0].start, 0, 0
    begin = 0
    for run in runs:
        first, last = max(offset, begin), min(offset + size, begin + len(run))
        if first < last:
            yield run.start + first - begin, first - offset, last - first
        begin += len(run)


def _box(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _chunks(
    fill: Fill, name: str, shape: tuple[int, ...], part: Part, dtype: torch.dtype
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
    """(offsets in the part, sizes, values) of all of a part; a source without boxes is asked for whole runs of rows."""
    direct = isinstance(fill, Boxes)
    for inside, sizes in _steps(part.sizes, part.sizes if direct else shape):
        offsets = tuple(map(sum, zip(part.offsets, inside, strict=True)))
        if direct:
            yield inside, sizes, fill.box(name, offsets, sizes, dtype)
        else:
            yield inside, sizes, _rows(fill, name, shape, offsets, sizes, dtype)


def _steps(sizes: tuple[int, ...], extent: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the steps in which a box of `sizes` is read, where rows as long as `extent`'s are read whole.

    A step runs over the first dim whose rows are no longer than a chunk; over the dims before it, one by one.
    """
    if not sizes:
        yield (), ()
        return
    if 0 in sizes:
        return
    depth = next(dim for dim in range(len(sizes)) if prod(extent[dim + 1 :]) <= CHUNK)
    each = CHUNK // prod(extent[depth + 1 :])
    behind = sizes[depth + 1 :]
    for lead in product(*map(range, sizes[:depth])):
        for row in range(0, sizes[depth], each):
            rows = min(each, sizes[depth] - row)
            yield (*lead, row, *(0 for _ in behind)), (*(1 for _ in lead), rows, *behind)


def _rows(
    fill: Fill, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A step's box, cut out of the run of whole rows in which it lies."""
    depth = next((dim for dim, size in enumerate(sizes) if size > 1), max(len(sizes) - 1, 0))
    width = prod(shape[depth + 1 :])
    first = sum(offset * prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets[: depth + 1]))
    rows = sizes[depth] if sizes else 1
    run = fill(name, first, first + rows * width, dtype).view((*sizes[: depth + 1], *shape[depth + 1 :]))
    return _box(run, (*(0 for _ in sizes[: depth + 1]), *offsets[depth + 1 :]), sizes)
