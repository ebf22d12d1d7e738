"""`config explain` over the whole tree: the schema's settings, and the plan's, which the plan's own classes define."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from fourfold.config import ConfigError, Loaded, Problem
from fourfold.config.explain import Explanation, here
from fourfold.config.explain import explain as explain_schema
from fourfold.config.problem import nearest


def explain(key: str, loaded: Loaded | None) -> Explanation:
    """Explain a dotted key; `plan.…` is read from the dataclasses of the plan and of the techniques it chooses.

    Raises:
        ConfigError: there is no such setting; with the nearest name.
    """
    if not key.startswith("plan."):
        return explain_schema(key, loaded)
    from fourfold.plan import Plan, Technique

    settings = loaded.config.plan if loaded is not None and isinstance(loaded.config.plan, dict) else {}
    holder: Any = Plan.of(settings)
    names = key.split(".")[1:]
    for depth, name in enumerate(names[:-1], 1):
        value = _value(holder, name, key)
        if not dataclasses.is_dataclass(value):
            where = ".".join(("plan", *names[:depth]))
            _refuse(key, f"{where} is {value!r} in this plan and holds no settings; give a config that chooses one")
        holder = value
    return _setting(key, names[-1], holder, Technique, loaded)


def _setting(key: str, name: str, holder: Any, technique: type, loaded: Loaded | None) -> Explanation:
    value, origin = here(key, loaded)
    if isinstance(holder, technique) and name == "name":
        return _choice(key, holder, value, origin)
    entry = _value(holder, name, key)
    owner = holder.options if isinstance(holder, technique) else holder
    field = next(field for field in dataclasses.fields(owner) if field.name == name)
    if dataclasses.is_dataclass(entry):
        inner: Any = getattr(entry, "options", entry)
        within = {each.name: _docs(inner, each.name).partition(". ")[0] for each in dataclasses.fields(inner)}
        within = {"name": f"which one; here {getattr(entry, 'name', '')}", **within} if inner is not entry else within
        text = " ".join(inspect.cleandoc(type(inner).__doc__ or "").split("\n\n")[0].split())
        return Explanation(key, "settings (lines of key: value)", None, text, False, within, value, origin)
    return Explanation(key, _holds(owner, field), _default(field), _docs(owner, name), False, None, value, origin)


def _choice(key: str, chosen: Any, value: Any, origin: str | None) -> Explanation:
    from fourfold.plan import techniques

    text = inspect.cleandoc(chosen.module.__doc__ or "").partition("\n")[0]
    holds = f"one of {', '.join(techniques(chosen.room))}"
    return Explanation(key, holds, chosen.name, text, False, None, value, origin)


def _value(holder: Any, name: str, key: str) -> Any:
    """A setting of a plan's part, or of a technique's options."""
    owner: Any = getattr(holder, "options", holder)
    known = [field.name for field in dataclasses.fields(owner)]
    if name not in known:
        _refuse(key, f"no such setting{nearest(name, known)}; there is {', '.join(known) or 'none'}")
    return getattr(owner, name)


def _docs(owner: Any, name: str) -> str:
    """The lines about one attribute in the docstring of the class or of one it extends, else the class's first line."""
    for kind in type(owner).__mro__:
        docs = inspect.cleandoc(kind.__doc__ or "")
        if match := re.search(rf"^ +{name}: (.+(?:\n {{8,}}.+)*)", docs, re.MULTILINE):
            return " ".join(match[1].split())
    return inspect.cleandoc(type(owner).__doc__ or "").partition("\n")[0]


def _holds(owner: Any, field: dataclasses.Field[Any]) -> str:
    """The words that a setting may be stand in its class's file under its name in capitals; else its type, in words."""
    allowed = getattr(inspect.getmodule(type(owner)), field.name.upper(), None)
    if isinstance(allowed, tuple):
        return f"one of {', '.join(allowed)}"
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    return words.get(str(field.type), str(field.type))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _refuse(key: str, text: str) -> None:
    raise ConfigError([Problem("", key, text)])
