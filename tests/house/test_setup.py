"""`make setup` says in plain words what is missing, and does nothing when nothing is to be done."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from house.rules import ROOT


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that set-up reads, in a folder of their own."""
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "Makefile", "scripts/setup"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def _setup(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--silent", "setup", f"PYTHON={python}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def _python(folder: Path, text: str) -> str:
    """A stand-in for an interpreter of this machine."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_no_python(copy: Path) -> None:
    done = _setup(copy, "python3.999")
    assert done.returncode != 0
    assert "no 'python3.999' found. Install Python 3.11 or newer" in done.stderr


def test_an_old_python(copy: Path) -> None:
    old = _python(copy, 'case "$1" in --version) echo Python 3.9.2 ;; *) exit 1 ;; esac')
    done = _setup(copy, old)
    assert done.returncode != 0
    assert "is Python 3.9.2; 3.11 or newer is needed" in done.stderr


def test_a_python_without_venv(copy: Path) -> None:
    done = _setup(copy, _python(copy, f'case "$2" in *ensurepip*) exit 1 ;; *) exec {sys.executable} "$@" ;; esac'))
    assert done.returncode != 0
    assert "apt-get install python3-venv" in done.stderr
    assert not (copy / ".venv").exists()


def test_an_installation_that_fails_leaves_no_mark_of_success(copy: Path) -> None:
    # The venv is "made" as a folder whose pip and uv always fail.
    made = r'mkdir -p "$4/bin"; cd "$4/bin"; printf "#!/bin/sh\nexit 1\n" | tee python pip uv >&2; chmod +x *'
    stand_in = _python(copy, f'case "$1" in -m) {made} ;; *) exec {sys.executable} "$@" ;; esac')
    done = _setup(copy, stand_in)
    assert done.returncode != 0
    assert "uv did not succeed; installing with pip" in done.stderr
    assert "the installation failed" in done.stderr
    assert not (copy / ".venv" / "fourfold-setup").exists()


@pytest.mark.parametrize("lent", [".venv", ".venv/bin"])
def test_an_environment_that_is_only_linked_is_left_alone(copy: Path, lent: str) -> None:
    lender = copy / "lender"
    lender.mkdir()
    (copy / lent).parent.mkdir(exist_ok=True)
    (copy / lent).symlink_to(lender)
    done = _setup(copy, sys.executable)
    assert done.returncode != 0
    assert ".venv is a link to another environment" in done.stderr
    assert not list(lender.iterdir())


def test_nothing_to_do(copy: Path) -> None:
    files = b"".join((copy / name).read_bytes() for name in ("pyproject.toml", "constraints.txt", "scripts/setup"))
    stamp = subprocess.run(["cksum"], input=files, capture_output=True, check=True).stdout
    (copy / ".venv").mkdir()
    (copy / ".venv" / "fourfold-setup").write_bytes(stamp)
    done = _setup(copy, "python3.999")  # is not even looked for
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (copy / "constraints.txt").write_text("torch==2.13.0\n")
    assert _setup(copy, "python3.999").returncode != 0
