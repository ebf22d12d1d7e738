"""Where every weight of a unit lies in its shard and in its full arena: pure arithmetic, no storage.

After x and y, a weight's local block is cut over z by rows, padding last. The rows that one rank holds of all the
unit's weights lie side by side in the *shard* (grouped for the optimizer), each weight's *segment* filled up to whole
cache lines; in the *full* arena every weight is contiguous. One message a unit turns the one into the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from fourfold.placement.cut import Block
from fourfold.placement.piece import Piece

LINE = 16
"""Segments, and weights in the full arena, begin at multiples of this many elements (a cache line of fp32). Vector
kernels then never fall back to their scalar tails inside a shard, which round differently: an update's bits do not
depend on which weights lie side by side."""

FROZEN = "frozen"
"""The group of weights that get no gradient; it lies last, so that gradients cover a prefix of the shard."""


@dataclass(frozen=True)
class Slot:
    """One weight in a unit.

    Attributes:
        name: logical parameter name.
        block: the part of the logical weight that this rank computes with.
        group: optimizer group.
        rows: what is dealt to ranks: the block's rows, or finer where there are fewer of them than ranks (`_rows`).
        width: elements a row.
        held: rows that a rank's segment has room for; the last ranks may hold fewer, or none.
        shard_start: first element of the segment in the shard.
        full_start: first element of the weight in the full arena.
    """

    name: str
    block: Block
    group: str
    rows: int
    width: int
    held: int
    shard_start: int
    full_start: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the block."""
        return self.block.shape

    @cached_property
    def numel(self) -> int:
        """Elements of the block."""
        return self.rows * self.width

    @cached_property
    def used(self) -> int:
        """Elements of a segment that rows can lie in."""
        return self.held * self.width

    @cached_property
    def segment(self) -> int:
        """Elements of the weight's segment in one shard: `used`, and padding up to a whole line."""
        return _whole_lines(self.used)

    @cached_property
    def padding(self) -> int:
        """Elements at the end of every segment that no row lies in: always zero."""
        return self.segment - self.used

    def taken(self, parts: int) -> int:
        """Elements of the weight's place in the full arena: all ranks' rows, and the rest of the last line."""
        return _whole_lines(self.used * parts)

    def span(self, index: int) -> tuple[int, int]:
        """The flat elements [first, last) of the block that rank `index` of z holds."""
        return min(index * self.used, self.numel), min((index + 1) * self.used, self.numel)

    def pieces(self, index: int) -> tuple[Piece, ...]:
        """The boxes of the logical weight that rank `index` of z holds; they fill the segment from its first element.

        One box where whole logical rows are dealt. A rank that holds nothing has an empty box, or none where the
        weight has no dims.
        """
        first, last = self.span(index)
        shift = self.shard_start - first
        return tuple(
            Piece(self.name, self.block.logical, part.offsets, part.sizes, part.start + shift, part.strides)
            for part in self.block.parts(first, last)
        )


def _whole_lines(elements: int) -> int:
    return -(-elements // LINE) * LINE


def _rows(shape: Sequence[int], parts: int) -> tuple[int, int]:
    """(rows, elements a row) of a weight: rows run over the fewest leading dims that give every part one.

    That is the first dim alone, but for weights with fewer rows than parts: [1, 197, 768] over 4 has 197 rows of 768,
    [2, 1000] over 4 has 2000 rows of 1. Such a weight would else lie on few ranks, and be padding on all the others.
    """
    depth = 1
    while depth < len(shape) and prod(shape[:depth]) < parts:
        depth += 1
    return prod(shape[:depth]), prod(shape[depth:])


@dataclass(frozen=True)
class Layout:
    """The slots of one unit, cut over `parts` ranks.

    Attributes:
        slots: in shard order: group by group, the frozen group last.
        parts: ranks that the rows are cut over.
        size: elements of one shard.
        trained: elements of the prefix of the shard that gets gradients.
        full: elements of the full arena.
    """

    slots: tuple[Slot, ...]
    parts: int
    size: int
    trained: int
    full: int

    @classmethod
    def of(
        cls, weights: Iterable[tuple[str, Sequence[int], str]], parts: int, blocks: Mapping[str, Block] | None = None
    ) -> Layout:
        """Lay out weights given as (name, logical shape, group) over `parts` ranks.

        Args:
            weights: of one unit.
            parts: ranks of z.
            blocks: what this rank computes with of each weight; of those not listed, all.
        """
        listed = list(weights)
        groups = list(dict.fromkeys(group for _, _, group in listed if group != FROZEN)) + [FROZEN]
        slots: list[Slot] = []
        size = trained = full = 0
        for group in groups:
            for name, shape, _ in (weight for weight in listed if weight[2] == group):
                block = (blocks or {}).get(name) or Block.whole(shape)
                rows, width = _rows(block.shape, parts)
                slots.append(Slot(name, block, group, rows, width, -(-rows // parts), size, full))
                size += slots[-1].segment
                full += slots[-1].taken(parts)
            if group != FROZEN:
                trained = size
        return cls(tuple(slots), parts, size, trained, full)

    @property
    def gathered(self) -> int:
        """Elements of all shards together: what a gather of the whole unit brings."""
        return self.size * self.parts

    @cached_property
    def padded(self) -> bool:
        """Some segment ends in padding."""
        return any(slot.padding for slot in self.slots)

    @cached_property
    def even(self) -> bool:
        """Every trained weight's rows divide: no rank holds fewer of them than another."""
        return all(slot.rows == slot.held * self.parts for slot in self.trained_slots)

    @cached_property
    def trained_slots(self) -> tuple[Slot, ...]:
        """The slots that get gradients."""
        return tuple(slot for slot in self.slots if slot.group != FROZEN)

    def groups(self) -> tuple[tuple[str, int, int], ...]:
        """(group, first element, past the last) of each trained group in the shard."""
        spans: dict[str, tuple[int, int]] = {}
        for slot in self.trained_slots:
            first, _ = spans.get(slot.group, (slot.shard_start, 0))
            spans[slot.group] = (first, slot.shard_start + slot.segment)
        return tuple((group, first, last) for group, (first, last) in spans.items())
