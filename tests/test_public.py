"""The public names: each is there, each is typed, and none costs anything before it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fourfold


def test_importing_fourfold_imports_nothing_heavy() -> None:
    script = (
        "import sys, fourfold; print(sorted(name for name in sys.modules if name in ('torch', 'pydantic', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", fourfold.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(fourfold, name) is not None
    assert name in dir(fourfold)


def test_type_checkers_see_the_same_names_from_the_same_homes() -> None:
    tree = ast.parse(Path(str(fourfold.__file__)).read_text(encoding="utf-8"))
    typed = {
        entry.name: node.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for entry in node.names
    }
    assert typed == fourfold._HOMES
    assert set(fourfold.__all__) == {*typed, "__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = fourfold.paralelize
