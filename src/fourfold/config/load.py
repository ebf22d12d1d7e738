"""A file and overrides become one validated config; everything that is wrong is said at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fourfold.config.complaint import complaints
from fourfold.config.document import Document, read
from fourfold.config.overrides import COMMAND, merge, parse
from fourfold.config.problem import ConfigError, Origins, Path, Problem
from fourfold.config.schema import Config

Check = Callable[[Mapping[str, Any]], Iterable[tuple[str, str]]]
"""Looks at the merged settings, valid or not, and yields (dotted key, what is wrong)."""


@dataclass(frozen=True)
class Loaded:
    """A config, where each of its settings was written, and the settings that were written at all."""

    config: Config
    origins: Origins
    settings: Mapping[str, Any]

    def origin(self, key: str) -> str:
        """Where a dotted key was written; `default` where it was not."""
        found: Any = self.settings
        for name in key.split("."):
            if not isinstance(found, Mapping) or name not in found:
                return "default"
            found = found[name]
        return self.origins.describe(key)


def load(path: str | None = None, overrides: Iterable[str] = (), checks: Iterable[Check] = ()) -> Loaded:
    """Read a YAML or TOML file (None: the defaults), lay overrides over it, and validate the whole once.

    Args:
        path: the config file.
        overrides: `key.path=value`, each value as in TOML.
        checks: what rooms above know beyond the schema (plans, paths, catalogues).

    Raises:
        ConfigError: everything that is wrong, each with its origin.
    """
    document = read(path) if path is not None else Document()
    parsed, problems = parse(overrides)
    settings, places = merge(document.settings, parsed)
    written = {key: f"{path}:{line}" for key, line in document.lines.items()}
    origins = Origins(path or (COMMAND if parsed else "defaults"), _laid_over(written, places))
    problems = [*document.problems, *problems, *_not_finite(settings.get("plan"), origins)]
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        config = None
        problems += complaints(error, origins)
    for check in checks:
        problems += [Problem(origins.describe(key), key, text) for key, text in check(settings)]
    if problems or config is None:
        raise ConfigError(sorted(_first_of_each(problems), key=_line))
    return Loaded(config, origins, settings)


def _laid_over(written: Mapping[Path, str], places: Mapping[Path, str]) -> dict[Path, str]:
    """Origins, where what an override replaced no longer counts."""
    kept = {path: place for path, place in written.items() if not any(path[: len(over)] == over for over in places)}
    return {**kept, **places}


def _not_finite(value: Any, origins: Origins, path: Path = ("plan",)) -> Iterator[Problem]:
    """Numbers that are not finite, in the part of the tree that the schema does not type."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _not_finite(entry, origins, (*path, str(key)))
    elif isinstance(value, float) and not math.isfinite(value):
        text = f"expected a finite number, found {value}; write a number, or remove the setting"
        yield Problem(origins.of(path), ".".join(path), text)


def _line(problem: Problem) -> float:
    """Problems are told in the order of the file; those of the command line come last."""
    line = problem.origin.rpartition(":")[2]
    return int(line) if line.isdigit() else math.inf if problem.origin == COMMAND else 0


def _first_of_each(problems: Iterable[Problem]) -> list[Problem]:
    """One problem a key: the format's word about a key comes before the schema's, the schema's before a check's."""
    found: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        identity = (problem.key, "") if problem.key else ("", str(problem))
        found.setdefault(identity, problem)
    return list(found.values())
