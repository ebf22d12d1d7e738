"""A full disk, a read-only one, another user's folder: a clear message, and the last good checkpoint stays."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("hostile_disk.py")
SPACE = re.compile(r"no room for the checkpoint in .*: needed [\d,]+ bytes, free [\d,]+ bytes; free some space")


def namespace() -> list[str] | None:
    """The command prefix that gives a process mounts of its own, where this system allows it."""
    for prefix in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        try:
            subprocess.run([*prefix, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return prefix
    return None


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What every case of `hostile_disk.py` that this system can stage reported."""
    prefix = namespace()
    command = [*(prefix or []), sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("disk"))]
    done = subprocess.run([*command, "mounts" if prefix else "plain"], check=True, capture_output=True, text=True)
    return {report["case"]: report for report in map(json.loads, done.stdout.splitlines())}


def test_no_room_says_how_much_is_needed_and_free(reports):
    found = [report for case, report in reports.items() if case.startswith(("full", "file limit"))]
    assert len(found) in (1, 4), "the file limit can be staged anywhere, a full disk where mounts can"
    for report in found:
        kind, text = report["error"]
        assert kind == "DiskFull" and SPACE.match(text), report
        assert report["latest"] == "step-00000001"


def test_the_other_writers_are_told_why(reports):
    told = [report["error"] for case, report in reports.items() if case.startswith("told")]
    assert len(told) == ("room again, disk" in reports)
    for kind, text in told:
        assert kind == "WriterLost" and text.startswith("rank 0 could not save: no room for the checkpoint in")


def test_a_folder_that_cannot_be_written_is_said_to_be_so_before_training(reports):
    found = [report for case, report in reports.items() if case.startswith(("read-only", "other user"))]
    assert len(found) in (2, 4)
    for report in found:
        kind, text = report["error"]
        assert kind == "ReadOnly" and "cannot be written to" in text and "name another folder" in text, report
        assert report["latest"] in ("step-00000001", "step-00000002")


def test_when_there_is_room_again_saving_goes_on(reports):
    found = [report for case, report in reports.items() if case.startswith("room again")]
    assert len(found) in (1, 2)
    for report in found:
        assert report["error"] == ["", ""] and report["latest"] == "step-00000002"
