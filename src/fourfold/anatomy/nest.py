"""Tensors in nests of tuples, lists, mappings (a model's output is one) and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors(value: Any) -> Iterator[Tensor]:
    """Those in it, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors(entry)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors(getattr(value, entry.name))


def replaced(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A nest of the same kinds, with `function` of every tensor in its place; all else is the same object."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return _entries(value, {key: replaced(entry, function) for key, entry in value.items()})
    if isinstance(value, tuple | list):
        entries = [replaced(entry, function) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(value)
        for entry in fields(value):
            object.__setattr__(found, entry.name, replaced(getattr(value, entry.name), function))
        return found
    return value


def _entries(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A mapping of the kind of `value`. An output of transformers is a dataclass as well, whose fields follow."""
    if type(value) is dict:
        return entries
    found = copy.copy(value)
    for key, entry in entries.items():
        found[key] = entry  # type: ignore[index]
    return found
