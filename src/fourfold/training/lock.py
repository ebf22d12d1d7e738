"""One run at a time in a run's folder: two would overwrite each other's journal and checkpoints."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class LockError(ValueError):
    """A run folder that another process is using."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for as long as this is entered; the system lets go of it when the process ends, however it ends.

    Raises:
        LockError: another process holds it; names the process.
    """
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise LockError(
                f"run {folder}: in use by process {file.read().strip() or 'unknown'}; "
                "wait until it has ended, or choose another run.name"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
