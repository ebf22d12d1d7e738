"""A technique is one file. It is found by the file's name and imported only when it is chosen.

The file defines a frozen dataclass `Options` (its settings, with defaults) and whatever its room asks for:
an order a function `order`, a rule a class `Rule`, a codec a class `Codec`, a tensor algorithm a function `grid`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import ModuleType
from typing import Any

ROOMS = {
    "schedule": "fourfold.schedule.orders.",
    "codec": "fourfold.wire.codecs.",
    "sync": "fourfold.sync.",
    "tensor": "fourfold.placement.tensor.grid_",
}
"""Where the files of each kind of technique live: a package, and how their names begin (none may with a digit)."""


class TechniqueError(ValueError):
    """A technique that does not exist, or options that it does not take."""


def techniques(room: str) -> tuple[str, ...]:
    """The names of a room's techniques, from its file names; nothing is imported but the package itself."""
    home, _, prefix = ROOMS[room].rpartition(".")
    package = importlib.util.find_spec(home)
    assert package is not None and package.submodule_search_locations is not None
    found = (module.name for module in pkgutil.iter_modules(package.submodule_search_locations))
    return tuple(sorted(name.removeprefix(prefix) for name in found if name.startswith(prefix) and name[0] != "_"))


@dataclasses.dataclass(frozen=True)
class Technique:
    """A technique's name and its options: comparable, and writable as a plain mapping."""

    room: str
    name: str
    options: Any

    @classmethod
    def find(cls, room: str, name: str, settings: Mapping[str, Any] | None = None) -> Technique:
        """Import the file called `name` and build its options. What is no letter or digit is "_" in a file's name.

        Raises:
            TechniqueError: no such file, or a setting that it does not have, with the nearest name.
        """
        said, name = name, re.sub(r"[-.]", "_", name)
        if name not in techniques(room):
            known = tuple(map(spelled, techniques(room)))
            raise TechniqueError(f"{room} has no technique {said!r}{_nearest(said, known)}; it has: {', '.join(known)}")
        options = importlib.import_module(ROOMS[room] + name).Options
        fields = tuple(entry.name for entry in dataclasses.fields(options))
        for key in settings or {}:
            if key not in fields:
                known = ", ".join(fields) or "none"
                raise TechniqueError(f"{room} {said!r} has no option {key!r}{_nearest(key, fields)}; it has: {known}")
        return cls(room, name, options(**(settings or {})))

    @property
    def module(self) -> ModuleType:
        """The technique's file, imported."""
        return importlib.import_module(ROOMS[self.room] + self.name)

    @property
    def spelling(self) -> str:
        """The name as people write it: "2.5d", "1d-sequence"."""
        return spelled(self.name)

    def to_dict(self) -> dict[str, Any]:
        """Name and options as one flat mapping, the form that a plan file holds."""
        return {"name": self.spelling, **dataclasses.asdict(self.options)}


def spelled(name: str) -> str:
    """A file's name as people write it: "_" is a point between digits, else a hyphen."""
    return re.sub(r"(?<=\d)_(?=\d)", ".", name).replace("_", "-")


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(name.lower(), known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
