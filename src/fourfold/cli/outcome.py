"""What a command shows: a result for people on stdout, or as JSON on stdout with everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Outcome(Protocol):
    """What the rooms return to a command."""

    @property
    def ok(self) -> bool:
        """What was checked holds; the exit code follows it."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        ...

    def text(self) -> Any:
        """Text or anything that rich prints."""
        ...


@dataclass(frozen=True)
class Listing:
    """Names, one a line."""

    what: str
    names: tuple[str, ...]
    ok: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The names under what they are."""
        return {self.what: list(self.names)}

    def text(self) -> str:
        """One name a line."""
        return "\n".join(self.names) or f"no {self.what}"


def show(outcome: Outcome, as_json: bool) -> int:
    """Print an outcome and return the exit code: 0 if it is ok, otherwise 1."""
    if as_json:
        print(encode(outcome.to_dict()))
    else:
        _print(outcome.text())
    return 0 if outcome.ok else 1


def encode(value: Any) -> str:
    """JSON by the standard, which has no NaN nor infinity: they become null."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False, default=str)


@contextlib.contextmanager
def printing(as_json: bool) -> Iterator[None]:
    """While a command works under `--json`, what it prints goes to stderr: stdout is one JSON text."""
    if not as_json:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(text: Any) -> None:
    if isinstance(text, str):
        print(text)
        return
    from rich.console import Console

    Console().print(text)
