"""A thread that does one job after the other: for what can only be waited for by blocking."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

Job = Callable[[], None]

LINGER = 1.0
"""Seconds without a job after which the thread ends: one whose owner was forgotten does not keep the process alive."""


class Clerk:
    """Does jobs in the order in which they are given. The thread begins with the first job.

    Jobs deal with their own exceptions.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._left = 0

    @property
    def busy(self) -> bool:
        """A job that was given is not done."""
        return self._left > 0

    def give(self, job: Job) -> None:
        """Returns at once."""
        with self._lock:
            self._left += 1
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self.name)
                self._thread.start()

    def close(self) -> None:
        """Return when every job is done and the thread has ended."""
        thread = self._thread
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=LINGER)
            except Empty:
                job = None
            if job is not None:
                job()
                del job  # and with it, all that it holds: the next one may be long in coming
                with self._lock:
                    self._left -= 1
                continue
            with self._lock:
                if not self._left:
                    self._thread = None
                    return
