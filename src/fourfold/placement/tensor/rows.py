"""Products whose rows are gathered before, or summed over ranks after: whole, or in chunks that travel meanwhile.

FLUX (Chang et al. 2024) fuses such a product with its collective, tile by tile, in one kernel. Here a product is cut
into chunks of rows, and the collective of one chunk is under way while the next is multiplied. Each rank begins at
another place: what it gathers at its own rows, which it has; what it scatters at its neighbour's, and ends at its own.

Rows lie as the first dim of a matrix; `parts` are how many of them belong to each rank of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fourfold.wire import Axis, Work
from fourfold.wire.formulas import shares

Product = Callable[[Tensor, Tensor], None]
"""(rows [M, K], out [M, N]): out = rows times some matrix."""


@dataclass(frozen=True)
class Lines:
    """How the rows of a tensor [..., features] lie that is cut along one of its dims.

    As a matrix, rows go along `dim` first: then the parts of the ranks follow each other, and what is gathered needs no
    copy.

    Attributes:
        shape: of the tensor on this rank.
        dim: along which it is cut (not the features').
        total: how many there are of all ranks, along this dim.
    """

    shape: Sequence[int]
    dim: int
    total: int

    @property
    def beside(self) -> int:
        """Rows of the matrix for each index along `dim`."""
        return torch.Size([*self.shape[: self.dim], *self.shape[self.dim + 1 : -1]]).numel()

    def parts(self, ranks: int) -> list[int]:
        """Rows of the matrix on each of so many ranks."""
        return [count * self.beside for count in shares(self.total, ranks)]

    def flat(self, x: Tensor) -> Tensor:
        """The matrix of a tensor, contiguous; a view where `dim` is the first."""
        return x.movedim(self.dim, 0).contiguous().view(x.shape[self.dim] * self.beside, x.shape[-1])

    def tensor(self, flat: Tensor) -> Tensor:
        """The tensor of a matrix, contiguous, its extent along `dim` as the rows say."""
        others = [*self.shape[: self.dim], *self.shape[self.dim + 1 : -1]]
        along = flat.shape[0] // self.beside if self.beside else 0
        return flat.view(along, *others, flat.shape[1]).movedim(0, self.dim).contiguous()


def gathered(shard: Tensor, axis: Axis, parts: Sequence[int], kind: str) -> tuple[Tensor, Work]:
    """The rows of all ranks, which are here once the work is waited for."""
    if axis.size == 1:
        return shard, Work.complete("all_gather", kind)
    full = shard.new_empty(sum(parts), shard.shape[1])
    return full, axis.all_gather(full, shard, kind, sizes=_sizes(parts, shard.shape[1]))


@dataclass
class Scattered:
    """This rank's rows of a sum over ranks, under way. `out` gets them in its own dtype when they are waited for."""

    work: Work
    full: Tensor
    """Every rank's rows: they belong to the work until it is waited for."""
    out: Tensor
    exact: Tensor
    """The sum: of 16-bit floats in float32, so that it is rounded once."""

    def wait(self) -> Tensor:
        """The rows, when they are here."""
        self.work.wait()
        return self.out if self.exact is self.out else self.out.copy_(self.exact)


def scattered(full: Tensor, axis: Axis, parts: Sequence[int], kind: str, out: Tensor | None = None) -> Scattered:
    """Begin to sum rows over the ranks, each of which gets its part."""
    if axis.size == 1 and out is None:
        return Scattered(Work.complete("reduce_scatter", kind), full, full, full)
    out = full.new_empty(parts[axis.index], full.shape[1]) if out is None else out
    half = out.dtype in (torch.bfloat16, torch.float16)
    exact = torch.empty_like(out, dtype=torch.float32) if half else out
    work = axis.reduce_scatter(exact, full, kind, sizes=_sizes(parts, full.shape[1]))
    return Scattered(work, full, out, exact)


def _sizes(parts: Sequence[int], width: int) -> list[int] | None:
    """In elements; None where all are equal, which backends do best."""
    return None if len(set(parts)) == 1 else [count * width for count in parts]


# ---- in chunks


def gather_multiply(
    shard: Tensor, out: Tensor, product: Product, axis: Axis, parts: Sequence[int], kind: str, chunks: int
) -> Tensor:
    """out = the gathered rows times a matrix; returns the gathered rows."""
    if chunks == 1 or axis.size == 1:
        full, work = gathered(shard, axis, parts, kind)
        work.wait()
        product(full, out)
        return full
    full = shard.new_empty(sum(parts), shard.shape[1])
    mine = _Places(parts, chunks, axis.index)
    arriving = [gathered(shard[place], axis, mine.counts(number), kind) for number, place in enumerate(mine.own())]
    begins = [0, *accumulate(parts)]
    own = slice(begins[axis.index], begins[axis.index + 1])
    full[own] = shard
    product(shard, out[own])
    for number, (rows, work) in enumerate(arriving):
        work.wait()
        pieces = rows.split(mine.counts(number))
        for step in range(1, axis.size):
            rank = (axis.index + step) % axis.size
            place = mine.place(rank, number)
            full[place] = pieces[rank]
            product(pieces[rank], out[place])
    return full


def multiply_scatter(
    full: Tensor, width: int, product: Product, axis: Axis, parts: Sequence[int], kind: str, chunks: int
) -> Tensor:
    """This rank's rows of the sum over ranks of `full` times a matrix of `width` columns."""
    if chunks == 1 or axis.size == 1:
        partial = full.new_empty(full.shape[0], width)
        product(full, partial)
        return scattered(partial, axis, parts, kind).wait()
    out = full.new_empty(parts[axis.index], width)
    places = _Places(parts, chunks, axis.index)
    leaving: list[Scattered] = []
    for number, own in enumerate(places.own()):
        counts = places.counts(number)
        partial = full.new_empty(sum(counts), width)
        pieces = partial.split(counts)
        for step in range(1, axis.size + 1):
            rank = (axis.index + step) % axis.size
            product(full[places.place(rank, number)], pieces[rank])
        leaving.append(scattered(partial, axis, counts, kind, out[own]))
    for one in leaving:
        one.wait()
    return out


def multiply_sum(full: Tensor, out: Tensor, product: Product, axis: Axis, kind: str, chunks: int) -> None:
    """out = the sum over ranks of `full` times a matrix."""
    leaving: list[Work] = []
    for rows, place in zip(full.split(shares(len(full), chunks)), out.split(shares(len(full), chunks)), strict=True):
        product(rows, place)
        if leaving:
            leaving[-1].proceed()
        if len(rows):
            leaving.append(axis.all_reduce(place, kind))
    for work in leaving:
        work.wait()


@dataclass(frozen=True)
class _Places:
    """Every rank's rows, cut into chunks.

    Attributes:
        parts: rows of each rank.
        chunks: that each of them is cut into.
        index: this rank.
    """

    parts: Sequence[int]
    chunks: int
    index: int

    def counts(self, number: int) -> list[int]:
        """Rows of each rank in one chunk."""
        return [shares(part, self.chunks)[number] for part in self.parts]

    def own(self) -> list[slice]:
        """This rank's chunks among its own rows."""
        ends = list(accumulate(shares(self.parts[self.index], self.chunks)))
        return [slice(first, last) for first, last in zip([0, *ends], ends, strict=False)]

    def place(self, rank: int, number: int) -> slice:
        """A rank's chunk among all rows."""
        counts = shares(self.parts[rank], self.chunks)
        first = sum(self.parts[:rank]) + sum(counts[:number])
        return slice(first, first + counts[number])
