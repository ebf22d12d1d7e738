"""Who is where: every rank keeps one small mapped file up to date, and the parent reads them when something stalls.

A backend may abort a rank without an exception, and a stalled rank says nothing: what it last wrote here is all that
can be known of it. A write is one `struct.pack_into` into a mapped page (about half a microsecond) and outlives
the rank.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from fourfold.wire.errors import WireError

_LAYOUT = struct.Struct("<Q II qQ BQ Q 32s 32s Q")
"""version, rank, pid, step, issued, state, number, time (ns), axis, op, version again (a torn read differs)."""

_COMPUTING, _WAITING = 0, 1


class Sighting(NamedTuple):
    """What a rank last wrote.

    Attributes:
        rank, pid: who.
        step: the optimizer step it was in.
        issued: collectives it had issued so far, on all axes.
        waiting: it was inside the collective `op` number `number` of `axis`; else it last left or issued it.
        axis, op, number: which collective; number 0 is a wait for a message, of which each rank has its own.
        at: time.monotonic_ns() of the writing; one clock for all processes of a machine.
    """

    rank: int
    pid: int
    step: int
    issued: int
    waiting: bool
    axis: str
    op: str
    number: int
    at: int

    def __str__(self) -> str:
        what = f"{self.op} {self.number}" if self.number else self.op
        where = f"{what} on axis {self.axis}" if self.op else "no collective yet"
        did = "waits in" if self.waiting else "is not waiting; last:"
        ago = (time.monotonic_ns() - self.at) / 1e9
        return f"rank {self.rank}, step {self.step}, {did} {where} ({ago:.1f} s ago)"


class Watch:
    """The writing end, held by one rank. Axes call it; training tells it of steps."""

    def __init__(self, folder: Path | str, rank: int) -> None:
        """Create (or overwrite) this rank's file in `folder`."""
        self.folder, self.rank = Path(folder), rank
        with open(path_of(self.folder, rank), "w+b") as file:
            file.truncate(_LAYOUT.size)
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._version = self._issued = self._number = 0
        self._labels: dict[str, bytes] = {"": b""}
        self._axis = self._op = b""
        self._pid = os.getpid()
        self.step(0)

    def step(self, step: int) -> None:
        """A step begins."""
        self._write(step, _COMPUTING)

    def issue(self, step: int, axis: str, op: str, number: int) -> None:
        """A collective is issued; nobody waits yet."""
        self._issued += 1
        self._at(axis, op, number)
        self._write(step, _COMPUTING)

    def enter(self, step: int, axis: str, op: str, number: int) -> None:
        """The rank blocks in a collective."""
        self._at(axis, op, number)
        self._write(step, _WAITING)

    def leave(self, step: int, axis: str, op: str, number: int) -> None:
        """A collective is complete."""
        self._at(axis, op, number)
        self._write(step, _COMPUTING)

    def describe_missing(self, members: Collection[int]) -> str:
        """For an error's text: which of `members` is not where it should be; empty if the files do not tell."""
        others = [one for one in read_all(self.folder) if one.rank in members and one.rank != self.rank]
        late = culprits([*others, read(path_of(self.folder, self.rank))])
        return "".join(f"; {one}" for one in others if one.rank in late)

    def close(self) -> None:
        """Let go of the file; it stays for whoever wants to read it."""
        self._map.close()

    def _at(self, axis: str, op: str, number: int) -> None:
        labels = self._labels
        if axis not in labels or op not in labels:
            labels[axis], labels[op] = axis.encode()[:32], op.encode()[:32]
        self._axis, self._op, self._number = labels[axis], labels[op], number

    def _write(self, step: int, state: int) -> None:
        self._version += 1
        _LAYOUT.pack_into(
            self._map,
            0,
            self._version,
            self.rank,
            self._pid,
            step,
            self._issued,
            state,
            self._number,
            time.monotonic_ns(),
            self._axis,
            self._op,
            self._version,
        )


def path_of(folder: Path | str, rank: int) -> Path:
    """The file that a rank writes."""
    return Path(folder) / f"rank-{rank}.watch"


def read(path: Path | str) -> Sighting:
    """What the rank that owns this file last wrote.

    Raises:
        OSError: there is no such file.
        WireError: it is no watch file, or its rank died in the middle of a write.
    """
    for _ in range(100):
        data = Path(path).read_bytes()
        if len(data) != _LAYOUT.size:
            raise WireError(f"{path}: expected a watch file of {_LAYOUT.size} bytes, found {len(data)}")
        version, rank, pid, step, issued, state, number, at, axis, op, again = _LAYOUT.unpack(data)
        if version == again and version:
            return Sighting(rank, pid, step, issued, state == _WAITING, _text(axis), _text(op), number, at)
        time.sleep(0.001)
    raise WireError(f"{path}: no complete record; its rank died while it wrote")


def read_all(folder: Path | str) -> list[Sighting]:
    """Every rank's last record, by rank; those whose file holds none are left out."""
    found = []
    for path in Path(folder).glob("rank-*.watch"):
        try:
            found.append(read(path))
        except (OSError, WireError):
            continue
    return sorted(found)


def culprits(sightings: Iterable[Sighting]) -> list[int]:
    """The ranks that the others wait for.

    Ranks that wait in nothing while others wait are the ones. Where all wait, it is those who are behind on an axis:
    they wait in another collective than the rest of that axis has reached. Nobody, where nobody waits.
    """
    known = list(sightings)
    waiting = [one for one in known if one.waiting]
    if not waiting:
        return []
    if len(waiting) < len(known):
        return [one.rank for one in known if not one.waiting]
    axes: dict[str, list[Sighting]] = defaultdict(list)
    for one in waiting:
        axes[one.axis].append(one)
    behind = {one.rank for group in axes.values() for one in group if one.number < max(other.number for other in group)}
    if not behind and len(axes) > 1:
        furthest = max(one.issued for one in waiting)
        behind = {one.rank for one in waiting if one.issued < furthest}
    return sorted(behind)


def _text(label: bytes) -> str:
    return label.rstrip(b"\0").decode(errors="replace")
