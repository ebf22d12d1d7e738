"""The journal of a run: JSON lines, one a step, that any tool can read while the run goes on.

Every record has a `kind` and a `step`, the optimizer steps done by then. Kinds: `start`, `step`, `evaluation`,
`checkpoint`, `note`, `resume`, `sample`, `end`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Journal:
    """The writing end. A record reaches the file at once, and the disk when a checkpoint does."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, kind: str, step: int, **fields: Any) -> Record:
        """Append a record and give it back."""
        record = {"kind": kind, "step": step, **fields}
        self._file.write(json.dumps(record) + "\n")
        return record

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close; closing twice does nothing."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def read(path: Path) -> list[Record]:
    """All records; a torn last line (the writer was killed) is left out."""
    return list(_records(path.read_text(encoding="utf-8"))) if path.exists() else []


def truncate(path: Path, step: int) -> None:
    """Drop what was recorded after `step` steps: a run resumed there takes those steps again."""
    kept = [record for record in read(path) if record["step"] <= step and record["kind"] != "end"]
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    aside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    aside.replace(path)


class Follower:
    """The reading end of a journal that another process writes and may truncate."""

    def __init__(self, path: Path, *, old: bool = False) -> None:
        """Follow from now on, or with `old` from the beginning. The file need not exist yet."""
        self._path = path
        self._offset, self._inode = 0, 0
        if not old and path.exists():
            state = path.stat()
            self._offset, self._inode = state.st_size, state.st_ino

    def poll(self) -> list[Record]:
        """The whole lines that are new. After a truncation: those from the `resume` record on."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            replaced = self._inode not in (0, inode)
            file.seek(0 if replaced else self._offset)
            content = file.read()
        if replaced and not content:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        records = list(_records(whole.decode("utf-8")))
        if replaced:
            resumed = [index for index, record in enumerate(records) if record["kind"] == "resume"]
            if not resumed:
                return []  # truncated, and the resuming process has not written yet
            records = records[resumed[-1] :]
            self._offset = 0
        self._inode, self._offset = inode, self._offset + len(whole)
        return records


def _records(text: str) -> Iterator[Record]:
    for line in text.splitlines(keepends=True):
        if line.endswith("\n") and line.strip():
            yield json.loads(line)
