"""One run at a time in a run's folder: two would overwrite each other's journal and checkpoints."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


class LockError(ValueError):
    """A run folder that another process is using, or that cannot be written."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for as long as this is entered; the system lets go of it when the process ends, however it ends.

    Raises:
        LockError: another process holds it (names the process), or it cannot be written.
    """
    path = folder / ".lock"
    try:
        file = path.open("ab+", buffering=0)
    except OSError as error:
        raise _unusable(path, error) from error
    with file:
        _take(file, path)
        yield


def _take(file: BinaryIO, path: Path) -> None:
    """Hold the file, and write down who does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
    except BlockingIOError as error:
        file.seek(0)
        raise LockError(
            f"run {path.parent}: in use by process {file.read().decode().strip() or 'unknown'}; "
            "wait until it has ended, or choose another run.name"
        ) from error
    except OSError as error:  # a file system without locks, a full disk
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> LockError:
    return LockError(
        f"run.folder: cannot write {path} ({error.strerror}); set run.folder to a place that can be written"
    )
