"""Grids beside one another: what each sends over which axis, where its time goes, and what it loses to the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from fourfold.plan import Plan
from fourfold.planner.forecast import Forecast
from fourfold.planner.search import Estimate, factors
from fourfold.planner.shortfall import shortfall
from fourfold.planner.tolls import AXES
from fourfold.planner.units import in_bytes, in_seconds

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
    for some, of_these in ((True, _estimates), (False, _impossible)):
        listed = [one for one in estimated if one.ranked.fits == some]
        if listed:
            yield of_these(listed)
            yield from _more(listed)


def best_of_each(forecasts: Sequence[Forecast]) -> dict[str, Forecast]:
    """The first forecast of each grid and algorithm, in the order of their ranks."""
    found: dict[str, Forecast] = {}
    for one in forecasts:
        found.setdefault(titled(one.plan), one)
    return found


def titled(plan: Plan) -> str:
    """The plan's grid, with the algorithm that cuts features, if one does."""
    tensor = plan.placement.tensor
    return f"{factors(plan)}{'' if tensor is None else f' ({tensor.spelling})'}"


def behind(one: Forecast, best: Forecast) -> str:
    """In words, what a plan loses to the best: what rules it out, or by how much its step is longer, and where."""
    return one.bound if one.bound or one is best else shortfall(one.timing, best.timing)


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
    count = f"{len(estimated)} grid{'s'[: len(estimated) > 1]} that cut{'' if len(estimated) > 1 else 's'} features"
    title = f"{count}, estimated by formula alone: these times compare with one another"
    table = Table(title=title, title_justify="left")
    for name in ("grid", "step", "memory", "loses to the best, by formula"):
        table.add_column(name, justify="right" if name in ("step", "memory") else "left")
    for one in estimated[:SHOWN]:
        memory = in_bytes(sum(one.ranked.memory.values()))
        table.add_row(str(one.ranked.grid), in_seconds(one.ranked.seconds), memory, one.behind)
    return table


def _impossible(estimated: Sequence[Estimate]) -> Table:
    table = Table(title="grids that cannot be", title_justify="left")
    table.add_column("grid")
    table.add_column("why")
    for one in estimated[:SHOWN]:
        table.add_row(str(one.ranked.grid), one.behind)
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
