"""What doctor found, one finding a line, each with what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["good", "warning", "wrong"]
MARKS = {"good": "ok  ", "warning": "WARN", "wrong": "BAD "}


@dataclass(frozen=True)
class Finding:
    """One checked thing.

    Attributes:
        what: what was looked at.
        level: good, a warning (it will run, but), or wrong (it will not).
        found: what was found, with units.
        advice: what is wrong and what to do; empty when all is well.
    """

    what: str
    level: Level
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Every finding, and the measured machine.

    Attributes:
        findings: in the order in which they were looked at.
        cluster: this machine in the form of `hardware.Cluster.to_dict`; empty where it could not be measured.
        written: the file that holds it for `hardware: here`; empty where it could not be written.
    """

    findings: tuple[Finding, ...]
    cluster: dict[str, Any]
    written: str = ""

    @property
    def ok(self) -> bool:
        """Nothing is wrong (there may be warnings)."""
        return all(finding.level != "wrong" for finding in self.findings)

    def text(self) -> str:
        """One line a finding, advice indented below it."""
        width = max((len(finding.what) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            lines.append(f"{MARKS[finding.level]} {finding.what:<{width}}  {finding.found}")
            if finding.advice:
                lines.append(f"     {'':<{width}}  -> {finding.advice}")
        counts = {level: sum(finding.level == level for finding in self.findings) for level in MARKS}
        lines.append("")
        lines.append(f"{counts['wrong']} wrong, {counts['warning']} warnings, {counts['good']} good")
        if self.written:
            lines.append(f"the measured machine is in {self.written}; `hardware: here` plans with it")
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        findings = [
            {"what": finding.what, "level": finding.level, "found": finding.found, "advice": finding.advice}
            for finding in self.findings
        ]
        return {"ok": self.ok, "findings": findings, "cluster": self.cluster, "written": self.written}
