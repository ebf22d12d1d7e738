"""What one setting means, as data for `config explain`."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from typing import Any

from pydantic.fields import FieldInfo

from fourfold.config.load import Loaded
from fourfold.config.problem import ConfigError, Problem, nearest
from fourfold.config.schema import Config, Section
from fourfold.config.shape import default, kinds, words


@dataclass(frozen=True)
class Explanation:
    """One setting, explained.

    Attributes:
        key: dotted.
        holds: what it may hold, in words.
        default: as a plain value; None also where it must be given (`required`).
        docs: what it means.
        required: it has no default.
        settings: for a section, each setting in it and the first line of its docs.
        value: what the given file and overrides make it; None where nothing was given.
        origin: where that value was written; "default" where it was not.
    """

    key: str
    holds: str
    default: Any
    docs: str
    required: bool = False
    settings: dict[str, str] | None = None
    value: Any = None
    origin: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def text(self) -> str:
        """A few lines for a terminal."""
        lines = [self.key, f"  {self.docs}", f"  holds: {self.holds}"]
        if self.settings is None:
            lines.append("  must be given" if self.required else f"  default: {_written(self.default)}")
        if self.origin is not None:
            lines.append(f"  here: {_written(self.value)} ({self.origin})")
        lines += [f"    {name}: {docs}" for name, docs in (self.settings or {}).items()]
        return "\n".join(lines)

    @property
    def ok(self) -> bool:
        """An explanation does not fail."""
        return True


def explain(key: str, loaded: Loaded | None = None) -> Explanation:
    """Explain a dotted key of the schema; where a section has kinds, the loaded one's first.

    Raises:
        ConfigError: there is no such setting; with the nearest name.
    """
    path = tuple(key.split("."))
    sections: list[type[Section]] = [Config]
    field: FieldInfo | None = None
    for depth, name in enumerate(path):
        known = dict.fromkeys(word for section in sections for word in section.model_fields)
        if name not in known:
            where = ".".join(path[:depth]) or "a config"
            text = f"{where} has no setting {name!r}{nearest(name, known)}; there is {', '.join(known) or 'none'}"
            raise ConfigError([Problem("", key, text)])
        field = next(section.model_fields[name] for section in sections if name in section.model_fields)
        sections = list(kinds(field).values())
    assert field is not None
    inner = {word: _first_line(entry) for section in sections for word, entry in section.model_fields.items()}
    docs = inspect.cleandoc(field.description or "")
    return Explanation(key, words(field), default(field), docs, field.is_required(), inner or None, *here(key, loaded))


def here(key: str, loaded: Loaded | None) -> tuple[Any, str | None]:
    """A setting's value in a loaded config and where it was written; (None, None) without one."""
    if loaded is None:
        return None, None
    value: Any = loaded.config.to_dict()
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value, loaded.origin(key)


def _first_line(field: FieldInfo) -> str:
    return inspect.cleandoc(field.description or "").partition("\n")[0]


def _written(value: Any) -> str:
    import json

    return "null" if value is None else value if isinstance(value, str) else json.dumps(value)
