"""A verdict kept in the folder of the run that it is about."""

from __future__ import annotations

from pathlib import Path

from fourfold.report import write
from fourfold.training.folder import write_json
from fourfold.verify.verdict import Verdict


def keep(folder: Path, verdict: Verdict) -> None:
    """Write `verify.json` into a run's folder, and its report again, which shows it."""
    write_json(folder / "verify.json", verdict.to_dict())
    write(folder)
