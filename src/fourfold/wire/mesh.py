"""The mesh: every rank has a coordinate on each named axis."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from math import prod

from fourfold.ledger import Ledger
from fourfold.plan.plan import AXES
from fourfold.wire.axis import DIGEST_BITS, Axis
from fourfold.wire.errors import UsageError
from fourfold.wire.world import World


class Mesh:
    """Named axes over the ranks of a world, fastest first: rank = x + X·(y + Y·(z + Z·(data + …))).

    Making a mesh, and the first `over` of a product, connects ranks: do both in the same order on every rank.

    Args:
        sizes: size of each axis; those left out have size 1. Their product is the size of the world.
        ledger: where this rank's traffic is recorded.
        ordered: also NCCL sums in rank order, at the price of an exchange into a buffer; the other backends always do.

    Attributes:
        sizes: of every axis, fastest first.
        coordinates: this rank's, by axis.
    """

    def __init__(
        self, world: World, sizes: Mapping[str, int], ledger: Ledger | None = None, *, ordered: bool = False
    ) -> None:
        for name, size in sizes.items():
            _known(name)
            if size < 1:
                raise UsageError(f"mesh axis {name}: expected a size of at least 1, found {size}")
        self.world, self.ledger, self.ordered = world, ledger or Ledger(rank=world.rank), ordered
        self.sizes = {name: sizes.get(name, 1) for name in AXES}
        if prod(self.sizes.values()) != world.size:
            shape = " × ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1) or "1"
            raise UsageError(f"mesh {shape} needs {prod(self.sizes.values())} ranks, the world has {world.size}")
        self.coordinates = self._coordinates(world.rank)
        self._axes: dict[str, Axis] = {}
        for name in AXES:
            self.over(name)

    def __getitem__(self, name: str) -> Axis:
        """The axis called `name`; of size 1 where the mesh was not given it."""
        _known(name)
        return self._axes[name]

    def over(self, *names: str) -> Axis:
        """The product of some axes as one, called "z+data": its ranks in the mesh's order, fastest axis first."""
        for name in names:
            _known(name)
        title = "+".join(name for name in AXES if name in names)
        axis = self._axes.get(title)
        if axis is None:
            members = self._members(set(names))
            channel = None
            if len(members) > 1:
                assert self.world.fabric is not None
                channel = self.world.fabric.channel(title, members, self.ordered)
            axis = self._axes[title] = Axis(self.world, title, members, self.ledger, channel)
        return axis

    @property
    def everyone(self) -> Axis:
        """All ranks: z and data, and every other axis with more than one."""
        return self.over(*(name for name, size in self.sizes.items() if size > 1 or name in ("z", "data")))

    @property
    def replica(self) -> Axis:
        """The ranks that hold one copy of the weights between them: z, and x and y if they have more than one."""
        return self.over(*(name for name in ("x", "y", "z") if self.sizes[name] > 1 or name == "z"))

    def digest(self) -> int:
        """A running hash of every collective this rank has issued, over all axes; fits a float64 exactly."""
        total = 0
        for title in sorted(self._axes):
            total = (total * 1_000_003 + self._axes[title].digest()) & ((1 << DIGEST_BITS) - 1)
        return total

    def advance(self) -> None:
        """Let every collective under way, on any axis, run the rounds that need not block."""
        for axis in self._axes.values():
            axis.advance()

    def __repr__(self) -> str:
        return f"Mesh({ {name: size for name, size in self.sizes.items() if size > 1} }, rank {self.world.rank})"

    def _coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for name, size in self.sizes.items():
            rank, found[name] = divmod(rank, size)
        return found

    def _members(self, names: set[str]) -> list[int]:
        fixed = {name: at for name, at in self.coordinates.items() if name not in names}
        return [
            rank
            for rank in range(self.world.size)
            if all(self._coordinates(rank)[name] == at for name, at in fixed.items())
        ]


def _known(name: str) -> None:
    if name not in AXES:
        near = get_close_matches(name, AXES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UsageError(f"mesh has no axis {name!r}{hint}; it has: {', '.join(AXES)}")
