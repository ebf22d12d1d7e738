"""A machine runs actions: it accepts them without blocking and reports completions in time order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from fourfold.schedule.action import Action
from fourfold.schedule.program import Lane

Body = Callable[[Action], None]
"""What a kind of action does: a machine has one body a kind."""


class Completion(NamedTuple):
    """An action that is done, and when it ran, in seconds of the machine's clock."""

    action: Action
    start: float
    end: float


class Machine(Protocol):
    """Virtual time, the calling thread, threads, streams or ranks: `drive` sees no difference."""

    @property
    def owns(self) -> Collection[int]:
        """The workers whose actions this process performs."""
        ...

    def issue(self, action: Action, lane: Lane) -> None:
        """Start an action on its lane; returns at once. A lane never has more than one action."""
        ...

    def next(self) -> Completion:
        """The next completion. Only called while an issued action is not yet reported."""
        ...


class Alert(Machine, Protocol):
    """A machine that knows whether anything more is done by now: what runs next may depend on all of it."""

    def due(self) -> bool:
        """Whether `next` would return at once, at the present moment of the machine's clock."""
        ...
