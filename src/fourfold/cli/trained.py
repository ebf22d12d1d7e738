"""What `fourfold train` shows at its end: what the run came to, and where its report lies."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fourfold.report import Report, ReportError, amount, off, write
from fourfold.training.outcome import TrainOutcome

SHOWN = {"step seconds": "a step", "memory peak": "tensors at peak"}
"""Rows of the forecast's table that the end of a run names."""


@dataclass(frozen=True)
class Trained:
    """A run and its report; where there is none, `trouble` says why. `again` is what goes on with it."""

    outcome: TrainOutcome
    again: str
    report: Report | None
    trouble: str = ""

    @classmethod
    def of(cls, outcome: TrainOutcome, again: str) -> Trained:
        """Write the report of a run that has ended, however it ended."""
        try:
            return cls(outcome, again, write(outcome.folder))
        except ReportError as error:
            return cls(outcome, again, None, str(error))

    @property
    def ok(self) -> bool:
        """The run ended well."""
        return self.outcome.ok

    def to_dict(self) -> dict[str, Any]:
        """The outcome, with the report's path, figures and forecast table under `report`."""
        report = self.report.to_dict() if self.report else {"ok": False, "error": self.trouble}
        return {"ok": self.ok} | self.outcome.to_dict() | {"report": report}

    def text(self) -> str:
        """A few lines: a finished run as a small table, another one in its own words."""
        if not self.ok or self.outcome.stopped or self.report is None:
            report = f"report {self.report.path}" if self.report else f"no report: {self.trouble}"
            return f"{self.outcome.text(self.again)}\n{report}"
        rows = self._rows(self.report)
        width = max(map(len, rows))
        return "\n".join(["", *(f"{name:<{width}}  {value}" for name, value in rows.items())])

    def _rows(self, report: Report) -> dict[str, str]:
        outcome = self.outcome
        rows = {"trained": f"{outcome.taken}, {outcome.plan}"}
        if outcome.validation is not None:
            rows["validation loss"] = f"{outcome.validation:.4f}"
        for row in report.differences:
            if row.what in SHOWN and row.error is not None:
                measured, forecast = (amount(row.what, value) for value in (row.measured, row.forecast))
                rows[SHOWN[row.what]] = f"{measured}; forecast {forecast}, {off(row)}"
        if outcome.failures:
            rows["started again"] = "; ".join(f"after {one}" for one in outcome.failures)
        return rows | {"run folder": str(outcome.folder), "report": str(report.path)}


def again(config: str, overrides: Iterable[str], name: str) -> str:
    """The command that goes on with a run, to be pasted into a shell: what was given, its name, and `--resume`."""
    own = ("run.name", "run.resume")
    kept = [override for override in overrides if override.partition("=")[0].strip() not in own]
    command = shlex.join(["fourfold", "train", config, *kept, f"run.name={name}", "--resume"])
    return f"under torchrun again, {command}" if "RANK" in os.environ else command
