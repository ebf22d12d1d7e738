"""The schema read as data: which settings a section has, and what each holds, in words."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from fourfold.config.problem import Path
from fourfold.config.schema import Config, Section
from fourfold.config.values import Words

SIMPLE = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", NoneType: "null"}


@dataclass(frozen=True)
class Spot:
    """A place in the tree.

    Attributes:
        path: the setting's key.
        field: the setting, or None where the key is unknown.
        owner: the section that holds it, or would.
    """

    path: Path
    field: FieldInfo | None
    owner: type[Section]


def kinds(field: FieldInfo) -> dict[str, type[Section]]:
    """The sections that a setting can be, by name; one without kinds has the name ""."""
    found = [part for part in _parts(field.annotation) if isinstance(part, type) and issubclass(part, Section)]
    return {str(part.model_fields["name"].default) if len(found) > 1 else "": part for part in found}


def default(field: FieldInfo) -> Any:
    """The default as a plain value, a section's as its settings; None for a setting that must be given."""
    if field.is_required():
        return None
    return field.default.model_dump(mode="json") if isinstance(field.default, Section) else _listed(field.default)


def words(field: FieldInfo) -> str:
    """What a setting holds: `a whole number of at least 1, or null`."""
    named = [entry.text for entry in field.metadata if isinstance(entry, Words)]
    return named[0] if named else ", or ".join(dict.fromkeys(_words(field.annotation)))


def locate(loc: tuple[str | int, ...]) -> Spot:
    """The place that a validation error's `loc` names; union labels inside it are passed over."""
    path: list[str] = []
    owner: type[Section] = Config
    options: dict[str, type[Section]] = {"": Config}
    field: FieldInfo | None = None
    for part in loc:
        if isinstance(part, str) and len(options) > 1 and part in options:
            options = {"": options[part]}
        elif isinstance(part, str) and len(options) == 1 and part in options[""].model_fields:
            owner = options[""]
            field = owner.model_fields[part]
            options = kinds(field)
            path.append(part)
        elif isinstance(part, int):
            path.append(str(part))
        elif options:
            owner, field = options.get("", owner), None
            path.append(part)
    return Spot(tuple(path), field, owner)


def everywhere() -> dict[str, list[str]]:
    """Every setting's last word and the dotted keys that end in it."""
    found: dict[str, list[str]] = {}
    pending: list[tuple[Path, type[Section]]] = [((), Config)]
    while pending:
        path, section = pending.pop()
        for name, field in section.model_fields.items():
            key = ".".join((*path, name))
            if key not in found.setdefault(name, []):
                found[name].append(key)
            pending += [((*path, name), kind) for kind in kinds(field).values()]
    return found


def _parts(annotation: Any) -> list[Any]:
    """The members of a union (or the one type), without their annotations."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    if get_origin(annotation) in (None, Literal) or isinstance(annotation, type):
        return [annotation]
    return [part for member in get_args(annotation) for part in _parts(member)]


def _words(annotation: Any) -> list[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        named = [entry.text for entry in arguments[1:] if isinstance(entry, Words)]
        return named or _words(arguments[0])
    if origin is Literal:
        allowed = ", ".join(str(choice) for choice in arguments)
        return [allowed if len(arguments) == 1 else f"one of {allowed}"]
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return ["settings (lines of key: value)"]
    if annotation in SIMPLE:
        return [SIMPLE[annotation]]
    return [phrase for member in arguments for phrase in _words(member)]


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
