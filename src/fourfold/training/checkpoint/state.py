"""The part of a run's state that is no tensor: JSON values that come back exactly as they went in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fourfold.training.checkpoint.errors import CheckpointError


def encode(state: Mapping[str, Any]) -> str:
    """The state as JSON text (floats to the last bit; NaN and infinities as Python's `json` writes them).

    Raises:
        CheckpointError: a value that would not come back as it is (a tuple, a tensor, a key that is no text).
    """
    _check(dict(state), "state")
    return json.dumps(dict(state))


def fingerprints(text: str) -> dict[str, str]:
    """A hash of every top-level entry of an encoded state."""
    entries: dict[str, Any] = json.loads(text)
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for key, value in entries.items()
    }


def _check(value: object, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{where}: expected text as a key, found {key!r} ({type(key).__name__})")
            _check(inner, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check(inner, f"{where}[{index}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise CheckpointError(
            f"{where}: expected a JSON value (dict, list, str, int, float, bool, None), found {type(value).__name__}; "
            f"a tensor is saved as a Box, a tuple as a list"
        )
