"""A wish to stop: SIGINT or SIGTERM sets it, the loop reads it between steps. The second signal is not caught.

Before there is a loop, and in commands that have none, a signal ends the process at once: `ended_in_words`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HEARD = "stopping after this step; once more to end at once"
ENDED = "stopped at once by SIGTERM"
STDERR = 2


class Stop:
    """A context in which the first SIGINT or SIGTERM is a wish and the next one does what it did before.

    Outside of the main thread, where Python delivers no signal, it only holds the wish.

    Attributes:
        asked: which signal came; None before.
    """

    def __init__(self, *, tells: bool = True) -> None:
        """Nothing is caught yet.

        Args:
            tells: say on stderr at once that the first signal was heard: a step may take a while.
        """
        self._tells = tells
        self.asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Somebody has asked to stop."""
        return self.asked is not None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        return self

    def __exit__(self, *raised: object) -> None:
        self._restore()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number)
        # The system's own action needs no Python, which waits for a backend's call that may never return.
        self._before = {
            number: signal.SIG_DFL if isinstance(handler, _Ended) else handler
            for number, handler in self._before.items()
        }
        self._restore()
        if self._tells:
            _say(HEARD)

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ended_in_words() -> Iterator[None]:
    """Until a `Stop` listens, SIGTERM ends the process at once, as it does anyway, and a line on stderr says so.

    Where another handler is in place, or outside of the main thread, it does nothing.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _Ended())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Ended:
    """A handler that says a word and lets the system do the rest; in a forked child it says nothing."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == self._process and os.environ.get("RANK", "0") == "0":
            _say(ENDED)
        os.kill(os.getpid(), number)


def _say(line: str) -> None:
    """Write past Python's buffers, which the signal may have interrupted; on a terminal, over `^C` and a bar."""
    with contextlib.suppress(OSError):
        start = "\r\x1b[2K" if os.isatty(STDERR) else ""
        os.write(STDERR, f"{start}{line}\n".encode())
