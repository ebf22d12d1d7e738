"""Every rank of the axis over which features do not lie has the same rows: between linears nothing changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fourfold import randomness
from fourfold.anatomy import Linear
from fourfold.placement.tensor.between import Between
from fourfold.placement.tensor.dealing import Dealing
from fourfold.placement.tensor.executor import Switch
from fourfold.placement.tensor.linears import Siblings
from fourfold.placement.tensor.rehearsal import Run


class Way(Between):
    """Activations lie on every rank of one axis (1D, 4D)."""

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
