"""Forecasts as people read them, and as a mapping for programs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from fourfold.hardware import Cluster
from fourfold.ledger.ledger import MEMORY
from fourfold.plan import Plan
from fourfold.planner import gridtable as grids
from fourfold.planner.forecast import Forecast
from fourfold.planner.pipeline import Rank
from fourfold.planner.search import Estimate
from fourfold.planner.subject import Subject
from fourfold.planner.units import in_bytes, in_seconds

SHOWN = 10
"""Rows of a table; what is left out is counted below it."""


@dataclass(frozen=True)
class Outlook:
    """The answer to "what would it cost here?": forecasts, the best first, and how they were made.

    Attributes:
        forecasts: ranked; the ones that do not fit are last.
        notes: what the reader should know about the figures.
        estimated: grids that cut features and were not traced: known by closed form alone.
    """

    subject: Subject
    cluster: Cluster
    forecasts: tuple[Forecast, ...]
    notes: tuple[str, ...] = ()
    estimated: tuple[Estimate, ...] = ()

    @property
    def ok(self) -> bool:
        """Some plan fits."""
        return any(one.fits for one in self.forecasts)

    @property
    def best(self) -> Plan | None:
        """The fastest plan that fits."""
        return next((one.plan for one in self.forecasts if one.fits), None)

    def text(self) -> str:
        """Tables: what fits, what does not and why, and the best one in detail."""
        fitting = [one for one in self.forecasts if one.fits]
        others = [one for one in self.forecasts if not one.fits]
        machine = f"{self.cluster.nodes} x {self.cluster.devices_per_node} x {self.cluster.device.name}"
        parts: list[Any] = [
            f"{self.subject.name} on {machine}, {self.subject.rows} row{'s'[: self.subject.rows > 1]} a step"
        ]
        if fitting:
            parts += [_table(fitting[:SHOWN]), *_left(fitting), *_detail(fitting[0])]
        else:
            parts.append("no plan fits")
        if others:
            parts += [_rejected(others[:SHOWN]), *_left(others)]
        if any(one.plan.placement.tensor for one in self.forecasts) or self.estimated:
            parts += grids.tables(self.forecasts, self.estimated)
        return rendered([*parts, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON."""
        best = self.best
        return {
            "model": self.subject.name,
            "cluster": self.cluster.to_dict(),
            "rows": self.subject.rows,
            "best": best.to_dict() if best else None,
            "forecasts": [to_dict(one) for one in self.forecasts],
            "estimated": [grids.to_dict(one) for one in self.estimated],
            "notes": list(self.notes),
        }


def to_dict(one: Forecast) -> dict[str, Any]:
    """One forecast as plain JSON; bytes and seconds."""
    return {
        "plan": one.plan.to_dict(),
        "fits": one.fits,
        "bound": one.bound,
        "memory": {**one.ledger.memory, "total": one.peak, "budget": one.budget, "when": one.when},
        "bytes": [
            {"axis": flow.axis, "kind": flow.kind, "op": flow.op, "calls": traffic.calls, "bytes": traffic.bytes}
            for flow, traffic in one.ledger.traffic().items()
        ],
        "seconds": {
            "likely": one.timing.total,
            "low": one.low,
            "high": one.high,
            "compute": one.timing.compute,
            "update": one.timing.update,
            "exposed": dict(one.timing.exposed),
            "hidden": dict(one.timing.hidden),
            "stretched": one.timing.stretched,
        },
        "ranks": [
            {"worker": rank.worker, "stages": list(rank.stages), "seconds": rank.busy, "memory": rank.peak}
            for rank in one.ranks
        ],
        "notes": dict(one.ledger.notes),
    }


def _table(forecasts: Sequence[Forecast]) -> Table:
    table = Table(title="plans that fit, fastest first", title_justify="left")
    for name in ("plan", "step", "from - to", "tokens/s", "memory", "sent a step"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    for one in forecasts:
        rate = one.ledger.notes["tokens"] / one.timing.total
        span = f"{in_seconds(one.low)} - {in_seconds(one.high)}"
        row = (in_seconds(one.timing.total), span, f"{rate:,.0f}", in_bytes(one.peak), in_bytes(one.ledger.sent()))
        table.add_row(str(one.plan), *row)
    return table


def _rejected(forecasts: Sequence[Forecast]) -> Table:
    table = Table(title="plans that do not fit, nearest first", title_justify="left")
    table.add_column("plan")
    table.add_column("what bound it")
    for one in forecasts:
        table.add_row(str(one.plan), one.bound)
    return table


def _left(forecasts: Sequence[Forecast]) -> list[str]:
    return [f"and {len(forecasts) - SHOWN} more"] if len(forecasts) > SHOWN else []


def _detail(one: Forecast) -> list[Any]:
    memory = Table(title=f"memory of a rank at its highest, during the {one.when}", title_justify="left")
    memory.add_column("category")
    memory.add_column("bytes", justify="right")
    for category in MEMORY:
        memory.add_row(category, in_bytes(one.ledger.memory.get(category, 0)))
    memory.add_row("all", f"{in_bytes(one.peak)} of {in_bytes(one.budget)}")
    time = Table(title="a step of a rank", title_justify="left")
    time.add_column("part")
    time.add_column("seconds", justify="right")
    time.add_row("forward and backward", in_seconds(one.timing.compute))
    for axis, waited in one.timing.exposed.items():
        time.add_row("idle: the pipeline's bubble" if axis == "bubble" else f"waiting for {axis}", in_seconds(waited))
    if one.timing.stretched:
        time.add_row("slowed by traffic beside it", in_seconds(one.timing.stretched))
    time.add_row("update", in_seconds(one.timing.update))
    parts: list[Any] = [f"best: {one.plan}", memory, time]
    if one.ranks:
        parts.append(_ranks(one.ranks))
    if one.ledger.traffic():
        sent = Table(title="bytes that a rank sends in a step", title_justify="left")
        for name in ("axis", "kind", "collective", "calls", "bytes"):
            sent.add_column(name, justify="right" if name in ("calls", "bytes") else "left")
        for flow, traffic in one.ledger.traffic().items():
            sent.add_row(flow.axis, flow.kind, flow.op, str(traffic.calls), in_bytes(traffic.bytes))
        parts.append(sent)
    return parts


def _ranks(ranks: Sequence[Rank]) -> Table:
    table = Table(title="workers of the pipeline", title_justify="left")
    for name in ("worker", "stages", "computes", "memory", "sends", "at its highest during"):
        table.add_column(name, justify="left" if name.startswith("at") else "right")
    for one in ranks:
        held = ", ".join(map(str, one.stages))
        figures = in_seconds(one.busy), in_bytes(one.peak), in_bytes(one.ledger.sent())
        table.add_row(str(one.worker), held, *figures, one.when)
    return table


def rendered(parts: Sequence[Any]) -> str:
    """Lines and tables as text."""
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=False, highlight=False)
    for part in parts:
        console.print(part)
    return out.getvalue().rstrip()
