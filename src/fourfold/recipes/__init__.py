"""Published systems, one file each: a plan, a workload, and the claim of the paper as a check that runs on a laptop.

A recipe's file defines `claim() -> Claim`; it is found by its name and imported when it is asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from fourfold.recipes._claim import Claim as Claim
from fourfold.recipes._claim import Reproduced as Reproduced
from fourfold.recipes._claim import Result as Result
from fourfold.recipes._claim import judge


def names() -> tuple[str, ...]:
    """The recipes, from their file names; none is imported."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_")))


def reproduce(wanted: Iterable[str]) -> Result:
    """Run the claims of these recipes, each with its control.

    Raises:
        ValueError: there is no recipe of that name.
    """
    results = []
    for name in wanted:
        if name not in names():
            raise ValueError(f"no recipe is called {name!r}; there are: {', '.join(names())}")
        results.append(judge(name, importlib.import_module(f"{__name__}.{name}").claim()))
    return Result(tuple(results))
