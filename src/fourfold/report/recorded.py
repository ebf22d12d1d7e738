"""What a run folder tells: its journal, its ledgers, its forecast, its configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    """

    path: Path
    records: tuple[Record, ...]
    ledgers: dict[int, Ledger]
    forecast: Ledger | None
    verdict: dict[str, Any]
    config: str
    plan: Plan | None
    origin: dict[str, Any]

    def of(self, kind: str) -> list[Record]:
        """Records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    def last(self, kind: str) -> Record:
        """The last record of a kind; empty if there is none."""
        return (self.of(kind) or [{}])[-1]


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
        ledgers = [Ledger.from_dict(_mapping(file)) for file in measured]
        return Recorded(
            path=path,
            records=records,
            ledgers={ledger.rank: ledger for ledger in ledgers},
            forecast=_forecast(folder.ledger),
            verdict=_mapping(path / "verify.json"),
            config=folder.config.read_text(encoding="utf-8") if folder.config.is_file() else "",
            plan=_plan(folder.config),
            origin=_mapping(folder.origin),
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
