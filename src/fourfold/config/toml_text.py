"""TOML, with the line of each key, which the standard library's reader does not keep."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from datetime import date, time
from typing import Any

from fourfold.config.document import Document
from fourfold.config.problem import ConfigError, Path, Problem

LONGEST = 500
"""Lines of one statement after which line numbers are given up (the values are not)."""


def parse(text: str, path: str) -> Document:
    """Read TOML text.

    Raises:
        ConfigError: the text is not TOML; keys that are written twice are an error of the format itself.
    """
    try:
        settings = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([_syntax(error, text, path)]) from None
    return Document(_plain(settings), dict(_lines(text)))


def value(text: str) -> Any:
    """One TOML value, such as 3, 1e-4, true, "text" or [1, 2].

    Raises:
        ValueError: the text is not one TOML value.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except RecursionError:
        raise ValueError("nested too deep") from None
    if set(parsed) != {"value"}:
        raise ValueError("more than one value")
    return _plain(parsed["value"])


def _plain(found: Any) -> Any:
    """Dates and times as text: no setting is one, and their text says best what was found."""
    if isinstance(found, dict):
        return {key: _plain(entry) for key, entry in found.items()}
    if isinstance(found, list):
        return [_plain(entry) for entry in found]
    return found.isoformat() if isinstance(found, (date, time)) else found


def _lines(text: str) -> Iterator[tuple[Path, int]]:
    """The line of each key. A statement is the fewest lines that are TOML by themselves."""
    table: Path = ()
    start, lines = 0, text.split("\n")
    for end in range(1, len(lines) + 1):
        if end - start > LONGEST:
            return
        try:
            paths = list(_paths(tomllib.loads("\n".join(lines[start:end]))))
        except ValueError:
            continue
        header = lines[start].lstrip().startswith("[")
        yield from (((*(() if header else table), *path), start + 1) for path in paths)
        table = paths[-1] if header else table
        start = end


def _paths(settings: dict[str, Any], above: Path = ()) -> Iterator[Path]:
    for key, entry in settings.items():
        yield (*above, key)
        if isinstance(entry, dict):
            yield from _paths(entry, (*above, key))


def _syntax(error: Exception, text: str, path: str) -> Problem:
    words = str(error)
    match = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)", words)
    line = match[1] if match and match[1] else str(text.count("\n") + 1)
    reason = words.replace(match[0], "") if match else words
    remedy = "quote text, and close every quote and bracket"
    if reason.startswith("Cannot"):
        remedy = "it is written twice: remove one of the two"
    return Problem(f"{path}:{line}", "", f"is not TOML: {reason}; {remedy}")
