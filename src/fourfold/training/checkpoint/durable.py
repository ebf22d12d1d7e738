"""Writes that are on the disk when the call returns."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Write a file aside, flush it to the disk, and give it its name: readers see all of it or nothing."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def flush_file(path: Path) -> None:
    """Flush a written file's contents to the disk."""
    _flush(path, os.O_RDWR)


def flush_folder(path: Path) -> None:
    """Flush a folder's entries (new names, renames) to the disk."""
    _flush(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
