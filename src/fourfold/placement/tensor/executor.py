"""What takes over a module's forward while its weights are blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn

from fourfold.placement.uncopied import Uncopied


class Switch:
    """Whether the weights of a split model are blocks just now, or whole (inside `Placed.gathered`)."""

    def __init__(self) -> None:
        self.split = True


class Executor(Uncopied, ABC):
    """One module with blocks for weights. Its forward is replaced on the instance: name, class and hooks stay."""

    def __init__(self, switch: Switch, module: nn.Module) -> None:
        """Take over `module.forward`."""
        self.switch, self.module = switch, module
        self.inner: Callable[..., Any] = module.forward
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model calls."""
        return self.on_blocks(*args, **kwargs) if self.switch.split else self.inner(*args, **kwargs)

    @abstractmethod
    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """The forward on this rank's blocks."""
