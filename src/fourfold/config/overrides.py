"""`key.path=value` from the command line, laid over a file's settings."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fourfold.config import toml_text, yaml_text
from fourfold.config.problem import Path, Problem

COMMAND = "command line"


@dataclass(frozen=True)
class Override:
    """One `key.path=value`, parsed."""

    path: Path
    value: Any


def parse(texts: Iterable[str]) -> tuple[list[Override], list[Problem]]:
    """Read overrides: what is a TOML value is one; a bare word is null, a number or text, as a file would hold it.

    So is a table as YAML has it in braces: {tensor: {algorithm: 4d}}.
    """
    texts = list(texts)
    overrides: list[Override] = []
    apart = _taken_apart(texts)
    problems = [Problem(COMMAND, key, _by_the_shell(key, values)) for key, values in apart.items()]
    for text in texts:
        if text.partition("=")[0] in apart:
            continue
        key, equals, written = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(re.fullmatch(r"[^\s\"'\[\]{}]+", part) for part in path):
            wanted = "expected key.path=value (no spaces around =), such as train.steps=10"
            problems.append(Problem(COMMAND, "", f"{wanted}; found {text[:60]!r}"))
        elif any(path == earlier.path for earlier in overrides):
            problems.append(Problem(COMMAND, ".".join(path), "given twice; keep one of the two"))
        else:
            try:
                overrides.append(Override(path, _value(written.strip())))
            except ValueError:
                problems.append(Problem(COMMAND, ".".join(path), _malformed(key, written.strip())))
    return overrides, problems


def merge(settings: dict[str, Any], overrides: Iterable[Override]) -> tuple[dict[str, Any], dict[Path, str]]:
    """New settings with the overrides in place, and the origin of each key that they wrote.

    An override under something that is no mapping (`plan.placement.data=2` over `plan: auto`) replaces it.
    """
    merged = copy.deepcopy(settings)
    places: dict[Path, str] = {}
    for override in overrides:
        inner = merged
        for depth, part in enumerate(override.path[:-1], 1):
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
                places[override.path[:depth]] = COMMAND
            inner = inner[part]
        inner[override.path[-1]] = override.value
        places[override.path] = COMMAND
    return merged, places


def _taken_apart(texts: Iterable[str]) -> dict[str, list[str]]:
    """Keys that come more than once, each time with a key in their value: a shell makes that of {a=1,b=2}."""
    found: dict[str, list[str]] = {}
    for text in texts:
        key, _, written = text.partition("=")
        found.setdefault(key, []).append(written)
    return {
        key: values
        for key, values in found.items()
        if len(values) > 1 and all(re.match(r"[\s{]*[\w-]+\s*=", value) for value in values)
    }


def _by_the_shell(key: str, values: list[str]) -> str:
    """What to write where an unquoted table has become many arguments: they are put together again."""
    before = os.path.commonprefix(values)
    before = before[: max(before.rfind("{"), before.rfind("=")) + 1]
    after = os.path.commonprefix([value[::-1] for value in values])
    after = after[: len(after) - len(after.lstrip("}"))]
    inner = ",".join(value[len(before) : len(value) - len(after)] for value in values)
    whole = f"{before}{{{inner}}}{after}"
    remedy = f"write {shlex.quote(f'{key}={quoted}')}" if (quoted := _quoted(whole)) else "put it in single quotes"
    return f"the shell has made {len(values)} arguments of the braces of one; {remedy}"


def _malformed(key: str, written: str) -> str:
    """What to write instead of a value that is no TOML; lists and tables of bare words are given back with quotes."""
    remedy = "put the argument in single quotes for the shell"
    if re.fullmatch(r"\[[^\[\]{}\"']+\]", written):
        listed = json.dumps([yaml_text.scalar(part.strip()) for part in written[1:-1].split(",")], ensure_ascii=False)
        remedy = f"text in a list is quoted: write {shlex.quote(f'{key}={listed}')}"
    elif written.startswith("{") and (quoted := _quoted(written)):
        remedy = f"text in a table is quoted: write {shlex.quote(f'{key}={quoted}')}"
    elif re.match(r"\{.*\w:[^\s].*\}$", written):
        remedy = "write a blank after each colon, or = in its place and quotes around text"
    return f"expected a TOML value, with every quote and bracket closed, found {written[:60]!r}; {remedy}"


def _quoted(written: str) -> str:
    """A table whose bare words are quoted; empty if that makes no TOML of it either."""
    quoted = re.sub(
        r"(=\s*)([^\s,=:{}\[\]\"']+)(?=\s*[,}\]])", lambda match: match[1] + _text_quoted(match[2]), written
    )
    try:
        toml_text.value(quoted)
    except ValueError:
        return ""
    return quoted


def _text_quoted(word: str) -> str:
    """The word as TOML has it: quotes around it if it is text."""
    try:
        toml_text.value(word)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return word


def _value(written: str) -> Any:
    try:
        return toml_text.value(written)
    except ValueError:
        if written[:1] == "{":
            return yaml_text.table(written)
        if written[:1] in ("[", '"', "'"):
            raise
        return yaml_text.scalar(written)
