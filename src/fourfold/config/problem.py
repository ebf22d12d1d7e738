"""What is wrong with a config, and where each setting came from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

Path = tuple[str, ...]
"""A setting's place in the tree: ("train", "steps")."""
SHOWN = 20
"""How many problems one screen holds."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        origin: `file:line`, the file, or the command line.
        key: the dotted key; empty where the problem is about the whole file.
        text: expected, found, and one thing to try.
    """

    origin: str
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, self.key, self.text) if part)


class ConfigError(ValueError):
    """A config that cannot be; `problems` lists everything that is wrong with it, not only the first thing."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__(self._screen())

    def _screen(self) -> str:
        lines = [str(problem) for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"… and {len(self.problems) - SHOWN} more")
        return lines[0] if len(lines) == 1 else "\n".join([f"{len(self.problems)} problems:", *lines])


@dataclass(frozen=True)
class Origins:
    """Where each setting was written.

    Attributes:
        source: the file, or what stands for it.
        places: `file:line` or the command line, for every key that was written.
    """

    source: str
    places: Mapping[Path, str]

    def of(self, path: Path) -> str:
        """The origin of a setting, or of the nearest enclosing one that was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.source

    def describe(self, key: str) -> str:
        """The origin of a dotted key: `run.yaml:12`, or `command line`."""
        return self.of(tuple(key.split(".")))

    def blame(self, message: str) -> Problem:
        """The problem behind a message that begins with its key, such as a plan's: `plan.placement.z: expected …`."""
        match = re.match(r"(\w+(?:\.[^\s:.]+)*): ", message)
        key = match[1] if match else ""
        return Problem(self.describe(key), key, message[match.end() :] if match else message)


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'lr'?)`, or nothing where no known name is near."""
    near = get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
