"""Why a rank failed: written by the rank, read by the parent. The first failure that is no consequence is the cause."""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fourfold.training.folder import write_json, write_text
from fourfold.wire import RankFailed

LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "read error",
    "write error",
)
"""What backends say when another rank has gone."""


@dataclass(frozen=True)
class Failure:
    """One rank's end.

    Attributes:
        rank: who.
        step: the optimizer step it was in, from 0; None where it is not known.
        reason: what happened, on one line.
        when: seconds since 1970.
        consequence: another rank's end was the cause (a lost connection, a rank that the parent ended).
        details: file with the traceback or the rank's output; None where there is none.
        mistake: the person's settings or data are wrong, not the program.
    """

    rank: int
    step: int | None
    reason: str
    when: float = field(default_factory=time.time)
    consequence: bool = False
    details: str | None = None
    mistake: bool = False

    def __str__(self) -> str:
        where = f"rank {self.rank}" + (f", step {self.step}" if self.step is not None else ", before the first step")
        return f"{where}: {self.reason}" + (f" (see {self.details})" if self.details else "")


def of_exception(error: BaseException, rank: int, step: int | None, details: Path | None) -> Failure:
    """The failure of a rank that raised."""
    ours = type(error).__module__.startswith("fourfold.")
    message = " ".join(str(error).split())
    reason = message if ours and message else f"{type(error).__name__}: {message}"
    reason += "".join(f", {note}" for note in getattr(error, "__notes__", ()) if note.startswith("during "))
    where = str(details) if details else None
    mistake = ours and isinstance(error, ValueError)
    return Failure(rank, step, reason, consequence=_lost(error), details=where, mistake=mistake)


def of_exit(code: int, rank: int, step: int | None, output: Path | None) -> Failure:
    """The failure of a rank that ended without a word: a signal, an abort inside the backend, a plain exit."""
    said = _last_words(output)
    if code >= 0:
        reason = f"ended with exit code {code}" + (f": {said}" if said else "")
    else:
        name = signal.Signals(-code).name
        meaning = {
            "SIGKILL": "killed by SIGKILL: somebody's kill -9, or the system ran out of memory",
            "SIGABRT": "aborted (SIGABRT), mostly inside the communication backend",
            "SIGSEGV": "crashed (SIGSEGV) inside native code",
        }.get(name, f"ended by {name}")
        reason = meaning + (f": {said}" if said and name != "SIGKILL" else "")
    return Failure(rank, step, reason, details=str(output) if output else None)


def write(failure: Failure, folder: Path, error: BaseException | None = None) -> Failure:
    """Write a rank's failure into the attempt's folder, with the traceback beside it."""
    if error is not None:
        details = folder / f"{failure.rank}.traceback.txt"
        write_text(details, "".join(traceback.format_exception(error)))
        failure = Failure(**{**asdict(failure), "details": str(details)})
    write_json(folder / f"{failure.rank}.failure.json", asdict(failure))
    return failure


def read(folder: Path) -> list[Failure]:
    """The failures that ranks of an attempt wrote, in the order of time."""
    found = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.failure.json")]
    return sorted(found, key=lambda failure: failure.when)


def cause(failures: Iterable[Failure]) -> Failure | None:
    """The first failure that is nobody else's consequence; if there are only consequences, the first of them."""
    ordered = sorted(failures, key=lambda failure: (failure.consequence, failure.when))
    return ordered[0] if ordered else None


def _lost(error: BaseException) -> bool:
    """The error, or one that it came from, says that another rank has gone."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        if isinstance(seen, RankFailed) or any(words in text for words in LOST):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _last_words(output: Path | None) -> str:
    """The line of a rank's output that says most: a native exception's text, or the last line."""
    if output is None or not output.exists():
        return ""
    lines = [line.strip() for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "what():" in line or "EnforceNotMet" in line or "Fatal Python error" in line]
    return (telling or lines or [""])[-1][:400]
