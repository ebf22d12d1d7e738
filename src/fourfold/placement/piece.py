"""The box of a logical tensor that a rank holds, and where it lies in the rank's flat shard."""

from __future__ import annotations

from math import prod
from typing import NamedTuple


class Piece(NamedTuple):
    """One box.

    Attributes:
        name: logical parameter name, as one process would see it.
        shape: logical shape of the whole parameter.
        offsets: where the box begins, per dim of the logical shape.
        sizes: extent of the box, per dim; a zero extent is an empty box (more ranks than rows).
        start: index in the flat shard of the box's first element; the box is contiguous from there.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.sizes)

    @property
    def stop(self) -> int:
        """Index in the flat shard just past the box."""
        return self.start + self.numel
