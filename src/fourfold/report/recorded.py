"""What a run folder tells: its journal, its ledgers, its forecast, its configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fourfold.config import ConfigError, load
from fourfold.ledger import Ledger
from fourfold.plan import Plan, PlanError
from fourfold.training import journal
from fourfold.training.folder import RunFolder
from fourfold.training.journal import Record


class ReportError(ValueError):
    """A folder of which no report can be written: which, why, and what to try."""


@dataclass(frozen=True)
class Recorded:
    """A run, as it was written down. What a run that was cut short did not write is empty.

    Attributes:
        path: the run folder.
        records: of the journal, in order.
        ledgers: measured, by rank.
        forecast: of one step of rank 0: the planner's, and for control traffic the run's own formulas, which stand in
            where nothing was forecast; None without either.
        verdict: what `fourfold verify` found; empty if it was not run.
        config: the resolved configuration, as text.
        plan: None where the configuration holds none that can be read.
        origin: versions, machine, command, git state, reasons for the plan.
        aside: folders that hold what was measured under earlier plans.
    """

    path: Path
    records: tuple[Record, ...]
    ledgers: dict[int, Ledger]
    forecast: Ledger | None
    verdict: dict[str, Any]
    config: str
    plan: Plan | None
    origin: dict[str, Any]
    aside: tuple[str, ...] = ()

    def of(self, kind: str) -> list[Record]:
        """Records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    def last(self, kind: str) -> Record:
        """The last record of a kind; empty if there is none."""
        return (self.of(kind) or [{}])[-1]

    def now(self, kind: str) -> list[Record]:
        """Records of one kind since the run has had its last plan."""
        return [record for record in self.records[self._replanned :] if record["kind"] == kind]

    @property
    def earlier(self) -> tuple[tuple[int, int, str], ...]:
        """(first step, last step, plan) of what ran under other plans before the last one."""
        starts = [record for record in self.records[: self._replanned] if record["kind"] == "start"]
        ends = [*(record["step"] for record in starts[1:]), self.records[self._replanned]["step"]] if starts else []
        return tuple(
            (start["step"] + 1, end, start.get("plan", "unknown"))
            for start, end in zip(starts, ends, strict=True)
            if end > start["step"]
        )

    @property
    def _replanned(self) -> int:
        """The place of the first `start` from which on every one has the last plan; 0 if all have it."""
        first = 0
        starts = [(place, record) for place, record in enumerate(self.records) if record["kind"] == "start"]
        for (_, before), (place, after) in pairwise(starts):
            first = place if _another(before, after) else first
        return first


def _another(before: Record, after: Record) -> bool:
    """Two `start` records have different plans."""
    key = "choices" if "choices" in before and "choices" in after else "plan"
    return before.get(key) != after.get(key)


def read(path: Path) -> Recorded:
    """Read a run folder.

    Raises:
        ReportError: it holds no journal, or a file in it is not what a run writes.
    """
    folder = RunFolder(path)
    if not folder.journal.is_file():
        raise ReportError(
            f"{path}: expected a run folder, found no {folder.journal.name}; name a folder that train wrote"
        )
    try:
        records = tuple(journal.read(folder.journal))
        measured = sorted(folder.ledger.glob("rank-*.json"))
        plan = _plan(folder.config)
        ledgers = [Ledger.from_dict(_mapping(file)) for file in measured]
        if plan is not None:  # a run that was resumed with fewer ranks, and has not ended
            ledgers = [ledger for ledger in ledgers if ledger.rank < plan.world]
        return Recorded(
            path=path,
            records=records,
            ledgers={ledger.rank: ledger for ledger in ledgers},
            forecast=_forecast(folder.ledger),
            verdict=_mapping(path / "verify.json"),
            config=folder.config.read_text(encoding="utf-8") if folder.config.is_file() else "",
            plan=plan,
            origin=_mapping(folder.origin),
            aside=tuple(sorted(f"{found.parent.name}/{found.name}" for found in folder.ledger.glob("earlier-*"))),
        )
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ReportError(f"{path}: cannot be read as a run folder: {error}") from error


def _mapping(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ReportError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _forecast(folder: Path) -> Ledger | None:
    """What the planner said before the run, and what only a placed run can say."""
    planned, formulas = _mapping(folder / "forecast.json"), _mapping(folder / "formulas.json")
    if not planned:
        return Ledger.from_dict(formulas) if formulas else None
    forecast = Ledger.from_dict(planned)
    if formulas:
        told = Ledger.from_dict(formulas).traffic()
        forecast.traffic(forecast.step).update({flow: one for flow, one in told.items() if flow.kind == "control"})
    return forecast


def _plan(path: Path) -> Plan | None:
    """The plan of a resolved configuration; None if another version wrote it in a form that this one cannot read."""
    try:
        config = load(str(path)).config
        return Plan.of(config.plan) if isinstance(config.plan, dict) else None
    except (ConfigError, PlanError, OSError):
        return None
