"""Every example is a config that loads, with its paths and its plan, from the repository's root."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fourfold.cli.settings import load
from fourfold.config import Config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def test_the_promised_ones_are_there() -> None:
    assert {"gpt_stdlib.yaml", "gpt_text.yaml", "hf_causal_lm.yaml"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_it_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    loaded = load(str(path.relative_to(ROOT)), [])
    assert loaded.config != Config()
    assert loaded.origins.describe("model").startswith(f"examples/{path.name}:")


def test_the_hugging_face_example_takes_a_folder_instead_of_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text("{}")
    loaded = load("examples/hf_causal_lm.yaml", [f"model.path={tmp_path}", "model.config=null"])
    model = loaded.config.to_dict()["model"]
    assert (model["path"], model["config"]) == (str(tmp_path), None)


def test_the_python_example_is_ten_lines_of_the_public_names() -> None:
    body = ast.parse((ROOT / "examples" / "python_api.py").read_text(encoding="utf-8")).body
    statements = [node for node in body if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr))]
    assert 0 < len(statements) <= 10
