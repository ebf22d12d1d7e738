"""What can go wrong with a checkpoint. Each error says what, where, expected, found, and one thing to try."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read as asked."""


class DiskFull(CheckpointError):
    """The file system has no room for the checkpoint."""


class ReadOnly(CheckpointError):
    """The folder cannot be written to."""


class Corrupted(CheckpointError):
    """Bytes on disk are not the bytes that were saved."""


class WriterLost(CheckpointError):
    """A writer did not deliver its part in time, or said why it could not."""


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write on the file system of `folder` (or of its nearest existing parent)."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def errno_of(error: BaseException) -> int | None:
    """The operating system's error number behind `error`; safetensors only gives it in its message."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found.group(1)) if found else None


def in_words(error: BaseException, folder: Path, need: int) -> CheckpointError | None:
    """`error` of a write of `need` bytes below `folder` as a `CheckpointError`; None if it is no error of writing."""
    if isinstance(error, CheckpointError):
        return error
    number = errno_of(error)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return no_space(folder, need, free_bytes(folder), os.strerror(number))
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ReadOnly(
            f"checkpoint folder {folder} cannot be written to ({os.strerror(number)}); "
            f"name another folder, or make this one writable for this user"
        )
    if number is not None:
        return CheckpointError(f"checkpoint folder {folder} could not be written: {error}")
    return None


def no_space(folder: Path, need: int, free: int, reason: str) -> DiskFull:
    """The error for `need` bytes that do not fit into the `free` bytes below `folder`."""
    return DiskFull(
        f"no room for the checkpoint in {folder} ({reason}): needed {need:,} bytes, free {free:,} bytes; "
        f"free some space, keep fewer checkpoints, or name a folder on another disk"
    )
