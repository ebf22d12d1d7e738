"""Grids beside one another: what each sends over which axis, where its time goes, and what it loses to the best."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from fourfold.plan import Plan
from fourfold.planner.forecast import GIB, Forecast
from fourfold.planner.search import Estimate, factors
from fourfold.planner.tolls import AXES

SHOWN = 6
"""Rows of a table; what is left out is counted below it."""


def tables(forecasts: Sequence[Forecast], estimated: Sequence[Estimate]) -> Iterator[Any]:
    """The best plan of every grid that was forecast, and below them the grids that were not."""
    best = best_of_each(forecasts)
    table = Table(title="grids, each by its best plan", title_justify="left")
    for name in ("grid", "step", "compute", "waits for", "memory", "sends over", "loses to the best"):
        table.add_column(name, justify="right" if name in ("step", "compute", "memory") else "left")
    for title, one in list(best.items())[:SHOWN]:
        timing = one.timing
        times = in_seconds(timing.total), in_seconds(timing.compute + timing.stretched), _waits(timing.exposed)
        table.add_row(title, *times, in_bytes(one.peak), _sent(one), behind(one, next(iter(best.values()))))
    yield table
    yield from _more(list(best))
    if estimated:
        yield _estimates(estimated)
        yield from _more(estimated)


def best_of_each(forecasts: Sequence[Forecast]) -> dict[str, Forecast]:
    """The first forecast of each grid and algorithm, in the order of their ranks."""
    found: dict[str, Forecast] = {}
    for one in forecasts:
        found.setdefault(titled(one.plan), one)
    return found


def titled(plan: Plan) -> str:
    """The plan's grid, with its algorithm unless that is 4D's."""
    tensor = plan.placement.tensor
    name = "4d" if tensor is None else re.sub(r"(?<=\d)_(?=\d)", ".", tensor.name).replace("_", "-")
    return f"{factors(plan)}{'' if name == '4d' else f' ({name})'}"


def behind(one: Forecast, best: Forecast) -> str:
    """In words, what a plan loses to the best: what rules it out, or the part of its step that is longer by most."""
    if one.bound or one is best:
        return one.bound
    mine, its = one.timing, best.timing
    grew = {
        f"waiting for {axis}": mine.exposed.get(axis, 0.0) - its.exposed.get(axis, 0.0)
        for axis in dict.fromkeys((*mine.exposed, *its.exposed))
    }
    grew["compute"] = mine.compute + mine.stretched - its.compute - its.stretched
    grew["the update"] = mine.update - its.update
    worst = max(grew, key=lambda part: grew[part])
    slower = mine.total - its.total
    if slower <= 0:
        return "no time"  # as fast, with more memory
    return f"{in_seconds(slower)}: {worst} + {in_seconds(grew[worst])}"


def to_dict(one: Estimate) -> dict[str, Any]:
    """A grid that was not traced, as plain JSON; bytes and seconds."""
    ranked = one.ranked
    return {
        "grid": ranked.grid._asdict(),
        "fits": ranked.fits,
        "behind": one.behind,
        "recompute": ranked.job.recompute,
        "microbatches": ranked.job.microbatches,
        "seconds": {"likely": ranked.seconds, "low": ranked.low, "high": ranked.high},
        "sent": dict(ranked.sent),
        "memory": {**ranked.memory, "total": sum(ranked.memory.values())},
    }


def _estimates(estimated: Sequence[Estimate]) -> Table:
    table = Table(
        title=f"{len(estimated)} grids that cut features were estimated by formula alone", title_justify="left"
    )
    for name in ("grid", "step", "memory", "loses to the best, by formula"):
        table.add_column(name, justify="right" if name in ("step", "memory") else "left")
    for one in estimated[:SHOWN]:
        memory = in_bytes(sum(one.ranked.memory.values()))
        table.add_row(str(one.ranked.grid), in_seconds(one.ranked.seconds), memory, one.behind)
    return table


def _more(listed: Sequence[Any]) -> list[str]:
    return [f"and {len(listed) - SHOWN} more"] if len(listed) > SHOWN else []


def _waits(exposed: Mapping[str, float]) -> str:
    waits: dict[str, float] = dict.fromkeys(AXES, 0.0)
    for axis, waited in exposed.items():
        waits[_main(axis)] = waits.get(_main(axis), 0.0) + waited
    return "\n".join(f"{axis} {in_seconds(waited)}" for axis, waited in waits.items() if waited)


def _sent(one: Forecast) -> str:
    sent = dict.fromkeys(AXES, 0)
    for flow, traffic in one.ledger.traffic().items():
        sent[_main(flow.axis)] = sent.get(_main(flow.axis), 0) + traffic.bytes
    return "\n".join(f"{axis} {in_bytes(nbytes)}" for axis, nbytes in sent.items() if nbytes)


def _main(axis: str) -> str:
    """ "y" of a part of it, "y/4"."""
    return axis.partition("/")[0]


def in_seconds(value: float) -> str:
    """A duration as people read it."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def in_bytes(value: float) -> str:
    """A size as people read it."""
    for unit, size in (("GiB", GIB), ("MiB", 1024**2), ("KiB", 1024)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"
