"""Ruff and import-linter are set up so that they notice what the house forbids."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from house.rules import ROOT


def _ruff(path: str, text: str) -> str:
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        "--output-format=concise",
        "--stdin-filename",
        path,
        "-",
    ]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("T201", "print(1)"),
        ("TID251", "import pickle"),
        ("S307", "eval('1')"),
        ("S102", "exec('1')"),
        ("TID251", "import torch\n\ntorch.load('x')"),
        ("TID251", "import torch.distributed as dist\n\ndist.all_gather_object([], 1)"),
        ("S506", "import yaml\n\nyaml.load('x')"),
        ("S602", "import subprocess\n\nsubprocess.run('ls', shell=True)"),
        ("B905", "list(zip([1], [2]))"),
        ("D103", "def public():\n    return 1"),
        ("D101", "class Public:\n    x = 1"),
        ("D102", 'class Public:\n    """Text."""\n\n    def method(self):\n        return 1'),
    ],
)
def test_ruff_notices(code: str, line: str) -> None:
    assert code in _ruff("src/fourfold/training/a.py", f'"""Text."""\n\n{line}\n')


def test_ruff_lets_the_command_line_print() -> None:
    assert "T201" not in _ruff("src/fourfold/cli/a.py", '"""Text."""\n\nprint(1)\n')


LAYERS = [
    ("wire", "import fourfold.placement"),
    ("placement", "import fourfold.sync"),
    ("plan", "import fourfold.wire"),
    ("schedule", "import torch"),
    ("planner", "import fourfold.models"),
    ("models", "import fourfold.plan"),
    ("training", "import fourfold.report"),
]


@pytest.mark.parametrize(("room", "line"), LAYERS)
def test_import_linter_notices(room: str, line: str, tmp_path: Path) -> None:
    package = tmp_path / "src" / "fourfold"
    shutil.copytree(ROOT / "src" / "fourfold", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (package / room / "planted.py").write_text(f"{line}\n")
    # The settings are those of the repository, the package is the copy: found first because it is named first.
    command = [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports_command as run; run()"]
    done = subprocess.run(
        [*command, "--no-cache", "--no-logo"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "src"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"fourfold.{room}.planted -> {line.split()[1]}" in done.stdout
