"""A machine in virtual time: nothing runs, every action takes what it is said to cost."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from fourfold.schedule.action import Action
from fourfold.schedule.machine import Completion
from fourfold.schedule.program import Lane

ROUNDING = 1e-12
"""Moments that differ by such a share, since their sums were taken in another order, are the same."""


class Virtual:
    """Actions that end at the same moment are reported in the sequence in which they were issued."""

    def __init__(self, workers: int, cost: Callable[[Action], float]) -> None:
        self.owns = range(workers)
        self.now = 0.0
        self._cost = cost
        self._running: list[tuple[float, int, float, Action]] = []
        self._issued = 0

    def issue(self, action: Action, lane: Lane) -> None:
        """Start at the present moment."""
        del lane  # a lane's actions come one at a time, so that its name changes nothing here
        self._issued += 1
        heapq.heappush(self._running, (self.now + self._cost(action), self._issued, self.now, action))

    def next(self) -> Completion:
        """Jump to the earliest end."""
        self.now, _, start, action = heapq.heappop(self._running)
        return Completion(action, start, self.now)

    def due(self) -> bool:
        """Whether something ends at the present moment."""
        return bool(self._running) and self._running[0][0] <= self.now * (1 + ROUNDING)
