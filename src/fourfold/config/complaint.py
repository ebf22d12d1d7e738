"""From a validation error to words: where, expected, found, one thing to try."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fourfold.config import yaml_text
from fourfold.config.overrides import COMMAND
from fourfold.config.problem import Origins, Path, Problem, nearest
from fourfold.config.schema import Section
from fourfold.config.shape import Spot, everywhere, kinds, locate, words


def complaints(error: ValidationError, origins: Origins) -> list[Problem]:
    """One problem for each setting that is wrong (a union's branches complain once)."""
    found: dict[Path, Problem] = {}
    for detail in error.errors(include_url=False):
        spot = locate(detail["loc"])
        path, text = _read(detail, spot, origins)
        found.setdefault(path, Problem(origins.of(path), ".".join(path), text))
    return list(found.values())


def shown(value: Any) -> str:
    """A value as one writes it in a file, shortened."""
    if isinstance(value, Mapping):
        return "settings" if value else "{}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a whole number of about {math.log10(abs(value)):.0f} digits"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _read(detail: ErrorDetails, spot: Spot, origins: Origins) -> tuple[Path, str]:
    """The key to report at (an error about two settings names its own) and the text."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "relation":
        path = (*spot.path, *context["key"].split("."))
        return path, detail["msg"]
    if kind == "extra_forbidden":
        return spot.path, _unknown(spot)
    if kind.startswith("union_tag"):
        assert spot.field is not None
        known = tuple(kinds(spot.field))
        name = value.get("name") if isinstance(value, Mapping) else value
        hint = nearest(str(name), known)
        return (*spot.path, "name"), f"expected one of {', '.join(known)}, found {shown(name)}{hint}{_more(spot.path)}"
    assert spot.field is not None
    expected = words(spot.field)
    if kind == "missing":
        return spot.path, f"expected {expected}, found nothing; write `{spot.path[-1]}: …` under {spot.path[-2]}"
    if isinstance(value, str) and expected.startswith("a list"):
        return spot.path, f"expected {expected}, found {shown(value)}; write {_listed(spot.path, value, origins)}"
    return spot.path, f"expected {expected}, found {shown(value)}; {_remedy(spot, expected, value)}"


def _unknown(spot: Spot) -> str:
    name = spot.path[-1]
    known = tuple(spot.owner.model_fields)
    hint = nearest(name, known)
    if "." in name:
        hint = f" (in a file, `{name.split('.')[0]}:` is a line of its own and the rest stands indented under it)"
    others = [kind for kind, section in _kinds_of(spot).items() if name in section.model_fields]
    if others:
        hint = f" (it belongs to {' or '.join(others)})"
    elsewhere = [key for key in everywhere().get(name, []) if key != ".".join(spot.path)]
    if not hint and elsewhere:
        hint = f" (did you mean {' or '.join(map(repr, elsewhere))}?)"
    kind = spot.owner.model_fields.get("name")
    where = f" of {kind.default}" if kind is not None and isinstance(kind.default, str) else ""
    return f"no such setting{where}{hint}; there is {', '.join(known)}"


def _kinds_of(spot: Spot) -> dict[str, type[Section]]:
    """The kinds among which the section that holds this setting was chosen."""
    field = locate(spot.path[:-1]).field
    return kinds(field) if field is not None else {}


def _remedy(spot: Spot, expected: str, value: Any) -> str:
    if expected.startswith("settings") and not isinstance(value, Mapping):
        name = spot.path[-1]
        return (
            f"indent its settings under `{name}:`, or remove the line"
            if value is None
            else f"write `{name}:` and its settings under it"
        )
    if isinstance(value, str) and expected.startswith("one of"):
        near = nearest(value, expected.removeprefix("one of ").replace(", or", ",").split(", "))
        if near:
            return near.strip(" ()")
    if isinstance(value, str) and "number" in expected:
        bare = yaml_text.scalar(value.replace("_", ""))
        if isinstance(bare, (int, float)) and not isinstance(bare, bool):
            return f"write {bare}, without quotes or underscores"
    if isinstance(value, str) and "true or false" in expected:
        meant = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
        if value.lower() in meant:
            return f"write {meant[value.lower()]}"
    if isinstance(value, float) and value.is_integer() and "whole number" in expected:
        return f"write {int(value)}"
    return _more(spot.path).removeprefix("; ")


def _listed(path: Path, value: str, origins: Origins) -> str:
    """One text as a list: the same in YAML and TOML, and quoted for the shell where it came from there."""
    listed = json.dumps([value], ensure_ascii=False)
    return shlex.quote(f"{'.'.join(path)}={listed}") if origins.of(path) == COMMAND else listed


def _more(path: Path) -> str:
    key = ".".join(part for part in path if not part.isdigit())
    return f"; `fourfold config explain {key}` says more"
