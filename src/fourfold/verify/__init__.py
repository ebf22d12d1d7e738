"""Proof and diagnosis: a plan beside one plain process, and what this machine is.

Names are imported when they are first used: doctor must speak where training cannot even be imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.verify.case import Case as Case
    from fourfold.verify.compare import verify as verify
    from fourfold.verify.verdict import Verdict as Verdict

_HOMES = {"Case": "case", "Verdict": "verdict", "verify": "compare"}


def __getattr__(name: str) -> Any:
    """Import a public name from its file."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
