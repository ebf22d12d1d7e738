"""An anatomy as plain JSON, and back: the planner traces in child processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fourfold.anatomy.roles import BatchNorm, Beside, Dropout, Linear, Norm, Raw, Shared, Whole
from fourfold.anatomy.survey import Anatomy
from fourfold.anatomy.watch import RandomCall
from fourfold.randomness import Layout

KINDS: dict[str, Any] = {
    "linears": Linear,
    "norms": Norm,
    "raw": Raw,
    "whole": Whole,
    "shared": Shared,
    "beside": Beside,
    "layouts": Layout,
    "dropouts": Dropout,
    "batch_norms": BatchNorm,
    "random_calls": RandomCall,
}


def restored(plain: Mapping[str, Any]) -> Anatomy:
    """The anatomy whose `dataclasses.asdict` went through JSON, which makes lists of all tuples."""
    return Anatomy(
        **{entry.name: _restored(plain[entry.name], KINDS.get(entry.name)) for entry in dataclasses.fields(Anatomy)}
    )


def _restored(value: Any, kind: Any) -> Any:
    if isinstance(value, dict):
        return {name: _one(entry, kind) for name, entry in value.items()}
    return tuple(_one(entry, kind) for entry in value) if isinstance(value, list) else value


def _one(value: Any, kind: Any) -> Any:
    return kind(*_frozen(value)) if kind is not None else _frozen(value)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list) else value
