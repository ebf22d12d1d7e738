"""What becomes of rows and time between a block's linears, where only features are cut by the grid itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fourfold import randomness
from fourfold.anatomy import Linear
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.dealing import Dealing, vectors
from fourfold.placement.tensor.executor import Switch
from fourfold.placement.tensor.linears import Siblings
from fourfold.placement.tensor.rehearsal import Run
from fourfold.wire import Axis, Mesh


class Between(ABC):
    """Activations of a block besides their features.

    Attributes:
        mesh: this rank's, or a dry one.
        dealing: the cuts of all weights.
        anatomy: of the model.
    """

    def __init__(self, mesh: Mesh, dealing: Dealing) -> None:
        self.mesh, self.dealing, self.anatomy = mesh, dealing, dealing.anatomy

    @abstractmethod
    def siblings(self, linear: Linear, modules: Sequence[nn.Module], about: Mapping[str, Any]) -> Siblings:
        """The product of linears that read the same tensor.

        Args:
            linear: the first of them.
            modules: which compute it.
            about: further settings of `Siblings`.
        """

    @abstractmethod
    def attach(self, model: nn.Module, switch: Switch) -> None:
        """Take over blocks, and modules in them, whose inputs or outputs change."""

    @abstractmethod
    def share(self, dealing: Dealing, model: nn.Module) -> None:
        """Note which weights have gradients of a part of the rows or of time.

        Raises:
            PlacementError: the model has no blocks in a row, or something in them that looks across what is cut.
        """

    @abstractmethod
    def remember(self, dealing: Dealing, whole: Run) -> dict[str, randomness.Window]:
        """After a rehearsal: how what was seen is dealt; by site, of which part of the rows a dropout is."""

    # ---- what all of them ask

    def axis(self, name: str | None) -> Axis:
        """An axis; where features are whole, one of a single rank."""
        return self.mesh.over() if name is None else self.mesh[name]

    def block_of(self, path: str) -> str | None:
        """The block that a module is in."""
        return next((block for block in self.anatomy.blocks if path.startswith(f"{block}.")), None)

    def first_halves(self) -> list[str]:
        """Paths of the modules that hold a block's first linears: an attention, an MLP."""
        first = (linear.module for linear in self.anatomy.linears.values() if linear.output == "y")
        return list(dict.fromkeys(_parent(path) for path in first if self.block_of(_parent(path)) is not None))

    def plain(self, linear: Linear, modules: Sequence[nn.Module], about: Mapping[str, Any]) -> Siblings:
        """Of rows that every rank has all of."""
        return Siblings(modules, self.axis(linear.contract), self.axis(linear.output), linear.layout, **about)

    def vectors(self, dealing: Dealing, model: nn.Module) -> list[tuple[str, str | None]]:
        """Weights in blocks that join activations elementwise, with the axis of these."""
        return [(name, axis) for name, axis in vectors(dealing, model) if self.block_of(name) is not None]

    def refuse_tokens(self, algorithm: str, other: str) -> None:
        """What rows or time cannot be dealt in.

        Raises:
            PlacementError: blocks in several places, or experts.
        """
        places = len({_parent(path) for path in self.anatomy.blocks})
        if places != 1:
            raise PlacementError(
                f"plan.placement.tensor: {algorithm}: expected blocks in one row, each of which gives what the next "
                f"one is given, found {len(self.anatomy.blocks)} blocks in {places} places; choose algorithm: {other}"
            )
        linears = self.anatomy.linears.items()
        experts = next((name for name, linear in linears if linear.layout.startswith("expert")), None)
        if experts is not None:
            raise PlacementError(
                f"{experts}: {algorithm} does not deal the tokens of experts; choose algorithm: {other}"
            )


class Copies(Between):
    """Every rank of the axis over which features do not lie has the same rows: nothing changes."""

    def siblings(self, linear: Linear, modules: Sequence[nn.Module], about: Mapping[str, Any]) -> Siblings:
        """One sum a direction."""
        return self.plain(linear, modules, about)

    def attach(self, model: nn.Module, switch: Switch) -> None:
        """Blocks are as they are."""

    def share(self, dealing: Dealing, model: nn.Module) -> None:
        """No gradient is of a part."""

    def remember(self, dealing: Dealing, whole: Run) -> dict[str, randomness.Window]:
        """Dropouts see all rows."""
        return {}


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
