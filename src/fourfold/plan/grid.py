"""The tensor grid of a plan: over how many ranks features and rows are cut, and by which product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, prod


@dataclass(frozen=True)
class Grid:
    """What a tensor-parallel algorithm asks of the mesh.

    Attributes:
        x: ranks that the residual's features are cut over. A normal linear contracts over them.
        y: ranks that heads, inner features and vocabulary are cut over.
        z: ranks that batch rows and the rows of stored weights are cut over.
        copies: replicas that the algorithm brings with it; they multiply `data`.
        between: what becomes of rows and time between linears: the name of a file of `placement.tensor` with a class
            `Way`.
        by_rows: modules that nobody can split, by path, in which `*` stands for anything: each rank of x and y computes
            them for its share of the batch rows, and not all of them for all rows.
    """

    x: int = 1
    y: int = 1
    z: int = 1
    copies: int = 1
    between: str = "copies"
    by_rows: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Ranks of one replica of the data."""
        return self.x * self.y * self.z

    @property
    def cuts_features(self) -> bool:
        """Some rank holds a part of the features only."""
        return self.x * self.y > 1


def patterns(value: object) -> tuple[str, ...]:
    """Paths of modules, as a plan's `by_rows` has them.

    Raises:
        ValueError: it is no list of text.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"by_rows: expected a list of module paths (`*` stands for anything), found {value!r}")
    return tuple(value)


def nearest(sizes: Sequence[int], world: int, count: int = 2) -> list[tuple[int, ...]]:
    """Grids of `world` ranks that are most like the one of these sizes: the fewest doublings and halvings."""
    found: list[tuple[int, ...]] = [()]
    for _ in sizes:
        found = [(*one, n) for one in found for n in range(1, world + 1) if world % (prod(one) * n) == 0]
    whole = [one for one in found if prod(one) == world]
    return sorted(whole, key=lambda one: sum(abs(log(a / b)) for a, b in zip(one, sizes, strict=True)))[:count]
