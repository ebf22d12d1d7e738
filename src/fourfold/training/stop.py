"""A wish to stop: SIGINT or SIGTERM sets it, the loop reads it between steps. The second signal is not caught."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HEARD = "stopping after this step; once more to end at once"
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
        self._restore()
        if self._tells:
            _say(HEARD)

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    """Write past Python's buffers, which the signal may have interrupted; on a terminal, over `^C` and a bar."""
    with contextlib.suppress(OSError):
        start = "\r\x1b[2K" if os.isatty(STDERR) else ""
        os.write(STDERR, f"{start}{line}\n".encode())
