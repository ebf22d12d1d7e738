"""The table of traps names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (?P<trap>[^|]+) \| (?P<where>[^|]+) \| (?P<test>[^|]+) \|$", re.MULTILINE)
ID = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> list[tuple[str, str]]:
    """(trap, test) of every row."""
    found = [(row["trap"], row["test"]) for row in ROW.finditer((ROOT / "docs/traps.md").read_text("utf-8"))]
    return [(trap, test) for trap, test in found if trap != "trap" and set(trap) != {"-"}]


def names(path: Path) -> set[str]:
    """The test functions of a file, read and not run."""
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("trap", "test"), rows())
def test_the_test_of_a_trap_exists(trap: str, test: str) -> None:
    found = ID.fullmatch(test)
    assert found is not None, f"{trap}: expected one test id, found {test}"
    file, name = found.groups()
    assert (ROOT / file).is_file(), f"{trap}: no {file}"
    assert name in names(ROOT / file), f"{trap}: {file} has no {name}"


def test_the_table_is_read() -> None:
    assert len(rows()) > 50
    assert len({trap for trap, _ in rows()}) == len(rows())
