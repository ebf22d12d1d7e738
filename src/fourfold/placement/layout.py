"""Where every weight of a unit lies in its shard and in its full arena: pure arithmetic, no storage.

After x and y, a weight's local block is cut over z by rows, padding last. The rows that one rank holds of all the
unit's weights lie side by side in the *shard* (grouped for the optimizer); in the *full* arena every weight is
contiguous. One message a unit turns the one into the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, prod

from fourfold.placement.piece import Piece

LINE = 16
"""Every segment is a multiple of this many elements (a cache line of fp32). Vector kernels then never fall back to
their scalar tails, which round differently: an update's bits do not depend on which weights lie side by side."""

FROZEN = "frozen"
"""The group of weights that get no gradient; it lies last, so that gradients cover a prefix of the shard."""


@dataclass(frozen=True)
class Slot:
    """One weight in a unit.

    Attributes:
        name: logical parameter name.
        shape: logical shape.
        group: optimizer group.
        rows: logical rows (a 0-dim weight has one).
        width: elements a row.
        held: rows that each rank's segment holds, padding included.
        shard_start: first element of the segment in the shard.
        full_start: first element of the weight in the full arena.
    """

    name: str
    shape: tuple[int, ...]
    group: str
    rows: int
    width: int
    held: int
    shard_start: int
    full_start: int

    @property
    def segment(self) -> int:
        """Elements of the weight's segment in one shard."""
        return self.held * self.width

    @property
    def numel(self) -> int:
        """Logical elements."""
        return self.rows * self.width

    def piece(self, index: int) -> Piece | None:
        """The box that rank `index` of z holds, relative to the shard's first element.

        It may be empty (more ranks than rows); of a 0-dim weight, which cannot be cut, all ranks but one hold none.
        """
        first = min(index * self.held, self.rows)
        last = min(first + self.held, self.rows)
        if not self.shape:
            return Piece(self.name, (), (), (), self.shard_start) if last > first else None
        offsets = (first, *(0 for _ in self.shape[1:]))
        return Piece(self.name, self.shape, offsets, (last - first, *self.shape[1:]), self.shard_start)


def _whole_lines(rows: int, width: int) -> int:
    """The smallest number of at least `rows` rows of `width` elements that fills whole lines."""
    step = LINE // gcd(width, LINE)
    return -(-rows // step) * step


@dataclass(frozen=True)
class Layout:
    """The slots of one unit, cut over `parts` ranks.

    Attributes:
        slots: in shard order: group by group, the frozen group last.
        parts: ranks that the rows are cut over.
        size: elements of one shard.
        trained: elements of the prefix of the shard that gets gradients.
    """

    slots: tuple[Slot, ...]
    parts: int
    size: int
    trained: int

    @classmethod
    def of(cls, weights: Iterable[tuple[str, Sequence[int], str]], parts: int) -> Layout:
        """Lay out weights given as (name, logical shape, group) over `parts` ranks."""
        listed = list(weights)
        groups = list(dict.fromkeys(group for _, _, group in listed if group != FROZEN)) + [FROZEN]
        slots: list[Slot] = []
        size = trained = 0
        for group in groups:
            for name, shape, _ in (weight for weight in listed if weight[2] == group):
                rows = shape[0] if shape else 1
                width = prod(shape[1:])
                held = _whole_lines(-(-rows // parts), width)
                slots.append(Slot(name, tuple(shape), group, rows, width, held, size, size * parts))
                size += held * width
            if group != FROZEN:
                trained = size
        return cls(tuple(slots), parts, size, trained)

    @property
    def full(self) -> int:
        """Elements of the full arena."""
        return self.size * self.parts

    @property
    def even(self) -> bool:
        """Every weight's rows divide: the arena has no padding."""
        return all(slot.rows == slot.held * self.parts for slot in self.slots)

    @property
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
