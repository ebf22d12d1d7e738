"""A machine that runs bodies in the calling thread, in the sequence in which they become ready.

This is what a rank without a pipeline uses: autograd's thread-local state, the ambient random position and CPU backward
all want one thread. Bodies run inside `next`, so that `issue` still returns at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from time import perf_counter

from fourfold.schedule.action import Action, ScheduleError
from fourfold.schedule.machine import Body, Completion
from fourfold.schedule.program import Lane


class Inline:
    """One worker, one thread. An exception of a body passes through unchanged, with a note that names the action."""

    def __init__(self, bodies: Mapping[str, Body], worker: int = 0) -> None:
        self.owns = (worker,)
        self._bodies = bodies
        self._waiting: deque[Action] = deque()

    def issue(self, action: Action, lane: Lane) -> None:
        """Queue the action.

        Raises:
            ScheduleError: there is no body for its kind.
        """
        if action.kind not in self._bodies:
            raise ScheduleError(
                f"no body runs {action} on {lane.name!r}; there are bodies for {', '.join(self._bodies)}"
            )
        self._waiting.append(action)

    def next(self) -> Completion:
        """Run the action that waited longest."""
        action = self._waiting.popleft()
        start = perf_counter()
        try:
            self._bodies[action.kind](action)
        except BaseException as error:
            error.add_note(f"during {action}")
            raise
        return Completion(action, start, perf_counter())
