"""Every command that a document shows is executed, in a scratch copy of the repository with a scratch home."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.blocks import ROOT, Block, all_blocks

RUN = [block for block in all_blocks() if block.runs]
SECONDS = 240
"""Longest a block may take; a longer one is marked with a shorter form of itself."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git tracks, or would, in a scratch folder, with the repository's own packages and commands."""
    scratch = tmp_path_factory.mktemp("documents") / "fourfold"
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for path in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if path and (ROOT / path).is_file():
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, scratch / path)
    for block in all_blocks():
        if block.document == "README.md" and "file" in block.marks:
            (scratch / block.marks["file"]).write_text(block.text)
    _lend(Path(sys.prefix), scratch)
    return scratch


def _lend(venv: Path, scratch: Path) -> None:
    """A .venv of links with a mark of its own: `make setup` has nothing to do, and reinstalls nothing in the lender."""
    (scratch / ".venv").mkdir()
    for entry in venv.iterdir():
        if entry.name != "fourfold-setup":
            (scratch / ".venv" / entry.name).symlink_to(entry)
    files = b"".join((scratch / name).read_bytes() for name in ("pyproject.toml", "constraints.txt", "scripts/setup"))
    stamp = subprocess.run(["cksum"], input=files, capture_output=True, check=True).stdout
    (scratch / ".venv" / "fourfold-setup").write_bytes(stamp)


@pytest.mark.documents
def test_setting_up_the_copy_does_nothing(copy: Path) -> None:
    done = subprocess.run(["make", "--silent", "setup"], cwd=copy, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A home and a temporary folder of its own, and this interpreter's commands first on the path."""
    home, temporary = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("tmp")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "TMPDIR": str(temporary), "PATH": path}
    return {**os.environ, **own}


@pytest.mark.documents
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{block.document}:{block.line}")
def test_the_block_runs(block: Block, copy: Path, environment: dict[str, str]) -> None:
    python = block.language == "python" and "run instead" not in block.marks
    command = [sys.executable, "-c", block.script] if python else ["bash", "-euo", "pipefail", "-c", block.script]
    done = subprocess.run(
        command,
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    expected = int(block.marks.get("exits", "0"))
    assert done.returncode == expected, (
        f"{block.document}:{block.line} ended with {done.returncode}, not {expected}\n{block.script}\n"
        f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
