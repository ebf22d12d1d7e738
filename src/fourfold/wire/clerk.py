"""A thread that does one job after the other: for what can only be waited for by blocking."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], None]


class Clerk:
    """Does jobs in the order in which they are given; they deal with their own exceptions. For one owner's thread.

    The thread begins with the first job. It is a daemon: gloo may leave it in a wait that nothing can end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._given = self._finished = 0

    @property
    def busy(self) -> bool:
        """A job that was given is not done."""
        return self._given > self._finished

    def give(self, job: Job) -> None:
        """Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
            self._thread.start()
        self._given += 1
        self._jobs.put(job)

    def close(self, within: float | None = None) -> None:
        """Return when every job is done and the thread has ended, or after so many seconds."""
        if self._thread is None:
            return
        self._jobs.put(None)
        self._thread.join(within)
        if not self._thread.is_alive():
            self._thread, self._jobs = None, SimpleQueue()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and with it all that it holds: the next one may be long in coming
            self._finished += 1
