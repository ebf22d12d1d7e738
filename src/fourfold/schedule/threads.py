"""A machine with a thread a lane: the workers of a pipeline inside one process, in real time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from time import perf_counter

from fourfold.schedule.action import MOVE, Action, ScheduleError
from fourfold.schedule.machine import Body, Completion
from fourfold.schedule.program import Lane

Outcome = Completion | tuple[Action, BaseException]


class Threads:
    """All workers share memory, so that a move without a body of its own only takes its place in time.

    A context manager: leaving it ends the threads once their present action is done.
    """

    def __init__(self, workers: int, bodies: Mapping[str, Body], clock: Callable[[], float] = perf_counter) -> None:
        self.owns = range(workers)
        self._bodies: dict[str, Body] = {MOVE: lambda action: None, **bodies}
        self._clock = clock
        self._lanes: dict[Lane, SimpleQueue[Action | None]] = {}
        self._threads: list[threading.Thread] = []
        self._done: SimpleQueue[Outcome] = SimpleQueue()

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *exception: object) -> None:
        for queue in self._lanes.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()

    def issue(self, action: Action, lane: Lane) -> None:
        """Hand the action to its lane's thread.

        Raises:
            ScheduleError: there is no body for its kind.
        """
        if action.kind not in self._bodies:
            raise ScheduleError(f"no body runs {action}; there are bodies for {', '.join(self._bodies)}")
        if lane not in self._lanes:
            queue = self._lanes[lane] = SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(queue,), name=f"{lane.name} of worker {lane.worker}")
            self._threads.append(thread)
            thread.start()
        self._lanes[lane].put(action)

    def next(self) -> Completion:
        """Wait for the next completion; an exception of a body is raised here, with a note that names the action."""
        outcome = self._done.get()
        if isinstance(outcome, Completion):
            return outcome
        action, error = outcome
        error.add_note(f"during {action}")
        raise error

    def due(self) -> bool:
        """Whether some lane has reported."""
        return not self._done.empty()

    def _serve(self, queue: SimpleQueue[Action | None]) -> None:
        while (action := queue.get()) is not None:
            start = self._clock()
            try:
                self._bodies[action.kind](action)
            except BaseException as error:  # raised again by next(), in the driving thread
                self._done.put((action, error))
            else:
                self._done.put(Completion(action, start, self._clock()))
