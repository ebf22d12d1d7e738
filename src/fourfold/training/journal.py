"""The journal of a run: JSON lines, one a step, that any tool can read while the run goes on.

Every record has a `kind` and a `step`, the optimizer steps done by then. Kinds: `start`, `step`, `evaluation`,
`checkpoint`, `note`, `kernels`, `resume`, `sample`, `end`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

Record = dict[str, Any]


class JournalError(ValueError):
    """A line that no run has written: says which, what it holds, and what to try."""


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
    """All records; a torn last line (the writer was killed) is left out.

    Raises:
        JournalError: another line is not a record.
    """
    return list(_records(path, path.read_bytes())) if path.exists() else []


def truncate(path: Path, step: int, source: str | None) -> None:
    """Drop what was recorded after `step` steps: a run resumed there takes those steps again.

    The `resume` record comes with the cut, at once: whoever reads along knows by it where the new records begin.

    Args:
        path: of the journal.
        step: at which the run goes on.
        source: the checkpoint that it goes on from; None where it begins again.
    """
    kept = [record for record in read(path) if record["step"] <= step and record["kind"] != "end"]
    kept.append({"kind": "resume", "step": step, "path": source})
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    aside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    aside.replace(path)


class Follower:
    """The reading end of a journal that another process writes and may truncate.

    It keeps the file open: as long as it is, no other file can have its identity, by which a truncation is known.
    """

    def __init__(self, path: Path, *, old: bool = False) -> None:
        """Follow from now on, or with `old` from the beginning. The file need not exist yet."""
        self._path = path
        self._offset = self._lines = 0
        self._file: BinaryIO | None = None
        if not old and path.exists():
            self._file = path.open("rb")
            content = self._file.read()
            self._offset, self._lines = len(content), content.count(b"\n")

    def poll(self) -> list[Record]:
        """The whole lines that are new. After a truncation: those from the `resume` record on, which comes with it.

        Raises:
            JournalError: one of them is not a record.
        """
        cut = self._turn()
        if self._file is None:
            return []
        self._file.seek(self._offset)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        before = self._lines
        self._offset, self._lines = self._offset + len(whole), before + whole.count(b"\n")
        records = list(_records(self._path, whole, before))
        first = max((at for at, record in enumerate(records) if record["kind"] == "resume"), default=0) if cut else 0
        return records[first:]

    def close(self) -> None:
        """Nothing is read any more."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _turn(self) -> bool:
        """Turn to the file that bears the journal's name now; whether it is another one than before."""
        try:
            named = self._path.open("rb")
        except FileNotFoundError:
            return False
        if self._file is not None and os.path.sameopenfile(self._file.fileno(), named.fileno()):
            named.close()
            return False
        cut = self._file is not None
        self.close()
        self._file, self._offset, self._lines = named, 0, 0
        return cut


def _records(path: Path, content: bytes, before: int = 0) -> Iterator[Record]:
    """The records in whole lines, which come after so many others."""
    for number, line in enumerate(content.split(b"\n")[:-1], start=before + 1):
        if line.strip():
            yield _record(path, number, line)


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, or nested without end
        record = None
    if isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int):
        return record
    shown = ascii(line[:60].decode("utf-8", "replace"))
    raise JournalError(
        f"{path}, line {number}: expected a JSON object with `kind` and `step`, found {shown}; delete this line "
        "(a run goes on from its checkpoints: the line is only a record of what it showed)"
    )
