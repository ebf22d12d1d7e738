"""A process that runs one rank under a parent: it says who it is, why it failed, and never outlives the parent."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fourfold.training import failure
from fourfold.training.folder import write_json

PARENT_POLL = 0.5
"""Seconds between two looks at whether the parent still lives."""


def as_rank(folder: Path, rank: int, work: Callable[[], object], step: Callable[[], int | None]) -> int:
    """Do a rank's work and return the exit code: 0 only if it ended well.

    Args:
        folder: of this attempt's ranks, read by the parent.
        rank: which one this process is.
        work: everything, from joining to the end.
        step: the optimizer step that the rank is in, for a failure's words.
    """
    die_with_parent()
    folder.mkdir(parents=True, exist_ok=True)
    _register(folder, rank, done=False)
    try:
        work()
    except BaseException as error:
        failure.write(failure.of_exception(error, rank, step(), None), folder, error)
        return 1
    _register(folder, rank, done=True)
    return 0


def living(folder: Path) -> dict[int, int]:
    """Rank to process, for the ranks that have said who they are and have not said that they are done."""
    entries = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.process.json")]
    return {entry["rank"]: entry["pid"] for entry in entries if not entry["done"]}


def die_with_parent() -> None:
    """When the parent is gone, however it went, this process ends too."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, name="parent", daemon=True).start()


def leave(code: int) -> None:
    """End this process now: a backend's threads may wait for ranks that are gone, and must not be waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _register(folder: Path, rank: int, *, done: bool) -> None:
    write_json(folder / f"{rank}.process.json", {"rank": rank, "pid": os.getpid(), "done": done})
