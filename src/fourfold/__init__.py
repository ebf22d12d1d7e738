"""fourfold: train networks on many devices by a plan of four choices, shown to equal the serial run.

Names are imported when they are first used, so that `import fourfold` and `fourfold --help` cost next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.anatomy import deferred as deferred
    from fourfold.config import Config as Config
    from fourfold.config import ConfigError as ConfigError
    from fourfold.hardware import Cluster as Cluster
    from fourfold.ledger import Ledger as Ledger
    from fourfold.plan import Plan as Plan
    from fourfold.plan import PlanError as PlanError
    from fourfold.training.optimizer import OptimizerOptions as OptimizerOptions
    from fourfold.training.run import Run as Run
    from fourfold.training.run import parallelize as parallelize
    from fourfold.training.step import StepResult as StepResult
    from fourfold.wire import join as join

_HOMES = {
    "Cluster": "fourfold.hardware",
    "Config": "fourfold.config",
    "ConfigError": "fourfold.config",
    "Ledger": "fourfold.ledger",
    "OptimizerOptions": "fourfold.training.optimizer",
    "Plan": "fourfold.plan",
    "PlanError": "fourfold.plan",
    "Run": "fourfold.training.run",
    "StepResult": "fourfold.training.step",
    "deferred": "fourfold.anatomy",
    "join": "fourfold.wire",
    "parallelize": "fourfold.training.run",
}
"""Where each public name lives; the imports above say the same to type checkers, and a test compares the two."""

__all__ = sorted([*_HOMES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name from its room."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("fourfold")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'fourfold' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
