"""Counts of heads that attention modules keep as attributes become those of the heads that are here.

Stock code asks for shapes in two ways: `view(..., -1, head_dim)`, which needs nothing, and by counts that the module
keeps. Names of such counts are few; a model that counts by another name is caught by the rehearsal (`rehearsal.py`),
which compares every shape with that of the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads", "num_key_value_heads", "num_kv_heads")
FEATURES = ("split_size", "embed_dim", "all_head_size", "hidden_size", "inner_dim", "q_size", "kv_size")
GROUPS = ("num_key_value_groups", "n_rep")


@dataclass(frozen=True)
class Counts:
    """What a module's projections hold: by whole count, the count here; of heads and of features.

    Attributes:
        heads: {heads of the whole: heads here}, for queries and for keys and values.
        features: the same of all their features.
        groups: query heads here for each key-value head here.
    """

    heads: Mapping[int, int]
    features: Mapping[int, int]
    groups: int


@dataclass(frozen=True)
class Patch:
    """An attribute, and its values for the whole and for this rank."""

    module: nn.Module
    name: str
    whole: Any
    here: Any

    def apply(self, *, split: bool) -> None:
        """Set the one or the other."""
        setattr(self.module, self.name, self.here if split else self.whole)


def patches(module: nn.Module, counts: Counts) -> Iterator[Patch]:
    """The attributes of an attention module that count what is cut, and a config of its own where that counts heads."""
    config = getattr(module, "config", None)
    counted = {name: here for name, value in _numbers(config) if (here := _heads(name, value, counts)) is not None}
    if counted:
        mine = copy.copy(config)
        for name, here in counted.items():
            setattr(mine, name, here)
        yield Patch(module, "config", config, mine)
    for name, value in _numbers(module):
        here = _heads(name, value, counts)
        if name in FEATURES:
            here = counts.features.get(value)
        elif name in GROUPS:
            here = counts.groups
        if here is not None and here != value:
            yield Patch(module, name, value, here)


def _numbers(holder: object) -> list[tuple[str, int]]:
    """Attributes that are whole numbers."""
    named = getattr(holder, "__dict__", {}).items()
    return [(name, value) for name, value in named if isinstance(value, int) and not isinstance(value, bool)]


def _heads(name: str, value: int, counts: Counts) -> int | None:
    """How many heads are here, if this is the name of a count of them."""
    here = counts.heads.get(value) if name in HEADS else None
    return None if here == value else here
