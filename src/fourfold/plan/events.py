"""What the rooms tell each other. Placement and sync never import one another: they meet here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GradientReady:
    """The summed gradient of one unit lies in `gradient`, and nobody will touch it until the update.

    Attributes:
        unit: index of the unit in execution order (the same on every rank).
        gradient: flat tensor, this rank's shard, and behind it what travels with it; a rule may reduce it in place.
    """

    unit: int
    gradient: torch.Tensor


@dataclass
class Events:
    """A list of listeners for one kind of event, called in the order in which they subscribed."""

    listeners: list[Callable[[GradientReady], None]] = field(default_factory=list)

    def subscribe(self, listener: Callable[[GradientReady], None]) -> None:
        """Call `listener` for every event from now on."""
        self.listeners.append(listener)

    def publish(self, event: GradientReady) -> None:
        """Tell every listener."""
        for listener in self.listeners:
            listener(event)
