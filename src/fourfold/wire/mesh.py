"""The mesh: every rank has a coordinate on each named axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
            axis = self._axes[title] = self._connect(title, self._members(set(names)))
        return axis

    def part(self, name: str, size: int) -> Axis:
        """The `size` consecutive ranks of an axis (or a product, "z+data") that this rank is among, called "y/4".

        With y = 8, `part("y", 4)` is ranks 0 … 3 of y on those four and 4 … 7 on the others: say, the ranks that hold
        copies of one KV head. Like `over`: asked for in the same order on every rank, connected once, metered apart.

        Raises:
            UsageError: the axis does not divide into parts of `size`.
        """
        whole = self.over(*name.split("+"))
        if size < 1 or whole.size % size:
            fit = ", ".join(str(n) for n in range(1, min(whole.size, 64) + 1) if whole.size % n == 0)
            raise UsageError(f"axis {whole.name} of {whole.size} ranks does not divide into parts of {size}; try {fit}")
        if size == whole.size:
            return whole
        title = f"{whole.name}/{size}"
        axis = self._axes.get(title)
        if axis is None:
            start = whole.index - whole.index % size
            axis = self._axes[title] = self._connect(title, whole.members[start : start + size])
        return axis

    @property
    def everyone(self) -> Axis:
        """All ranks: z and data, and every other axis with more than one."""
        return self.over(*(name for name, size in self.sizes.items() if size > 1 or name in ("z", "data")))

    @property
    def replica(self) -> Axis:
        """The ranks that hold one copy of the weights between them: z, and x, y and pipe if they have more than one."""
        return self.over(*(name for name in ("x", "y", "z", "pipe") if self.sizes[name] > 1 or name == "z"))

    @property
    def first_replica(self) -> Sequence[int]:
        """The ranks of the first copy of the weights: those at 0 of `data`."""
        below = prod(size for name, size in self.sizes.items() if AXES.index(name) < AXES.index("data"))
        return [rank for rank in range(self.world.size) if rank // below % self.sizes["data"] == 0]

    def digest(self) -> int:
        """A running hash of every collective this rank has issued; fits a float64 exactly. Equal on all ranks.

        Axes that cut features alone are left out: what crosses there is as large as a rank has rows. Their ranks check
        one another with every collective.
        """
        total = 0
        for title in sorted(self._axes):
            if set(title.partition("/")[0].split("+")) <= {"x", "y"}:
                continue
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

    def _connect(self, title: str, members: Sequence[int]) -> Axis:
        channel = None
        if len(members) > 1:
            assert self.world.fabric is not None
            channel = self.world.fabric.channel(title, members, self.ordered)
        return Axis(self.world, title, members, self.ledger, channel)

    def _members(self, names: set[str]) -> Sequence[int]:
        """The ranks that differ from this one on `names` only, in order. Neighbouring axes are one range, however long:
        the mesh of a forecast may have tens of thousands of ranks.
        """
        first, stride = self.world.rank, 1
        runs: list[tuple[int, int]] = []
        for name, size in self.sizes.items():
            if name in names and size > 1:
                first -= self.coordinates[name] * stride
                step, length = runs.pop() if runs and runs[-1][0] * runs[-1][1] == stride else (stride, 1)
                runs.append((step, length * size))
            stride *= size
        members: Sequence[int] = range(first, first + 1)
        for step, length in runs:
            if len(members) == 1:
                members = range(first, first + step * length, step)
            else:
                members = [member + step * number for number in range(length) for member in members]
        return members


def _known(name: str) -> None:
    if name not in AXES:
        near = get_close_matches(name, AXES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UsageError(f"mesh has no axis {name!r}{hint}; it has: {', '.join(AXES)}")
