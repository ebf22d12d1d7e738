"""`config explain` reaches every setting, the plan's too."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.cli.explain import explain
from fourfold.config import load
from fourfold.plan import Placement


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Placement)])
def test_every_setting_of_placement_has_words_of_its_own(name: str) -> None:
    found = explain(f"plan.placement.{name}", None)
    assert found.default == getattr(Placement(), name)
    assert found.docs
    assert found.docs != (Placement.__doc__ or "").splitlines()[0]


def test_allowed_words_are_listed() -> None:
    assert explain("plan.placement.shard", None).holds == "one of none, optimizer, gradients, parameters"


def test_a_technique_is_explained_with_its_options() -> None:
    assert explain("plan.schedule.name", None).default == "accumulate"
    assert explain("plan.schedule.microbatches", None).default == 1
    assert set(explain("plan.schedule", None).settings or {}) == {"name", "microbatches"}


def test_settings_that_techniques_share_are_explained_where_they_are_declared(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("plan: {placement: {pipe: 2}, schedule: {name: interleaved, microbatches: 4}}\n")
    loaded = load(str(file), [])
    assert explain("plan.schedule.microbatches", loaded).docs.startswith("parts into which the rows")
    chunks = explain("plan.schedule.chunks", loaded)
    assert chunks.default == 2 and chunks.docs.startswith("stages a worker")


def test_the_value_and_its_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("train: {steps: 3}\nplan:\n  placement: {z: 2, shard: optimizer}\n")
    loaded = load(str(file), ["plan.placement.z=4"])
    assert (explain("train.steps", loaded).value, explain("train.steps", loaded).origin) == (3, f"{file}:1")
    assert (explain("train.batch", loaded).value, explain("train.batch", loaded).origin) == (8, "default")
    assert explain("plan.placement.shard", loaded).origin == f"{file}:3"
    assert (explain("plan.placement.z", loaded).value, explain("plan.placement.z", loaded).origin) == (
        4,
        "command line",
    )
    assert main(["config", "explain", "plan.placement.z", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["key"], found["value"], found["default"], found["origin"]) == ("plan.placement.z", 2, 1, f"{file}:3")


def test_a_setting_without_a_default_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "data.files"]) == 0
    assert "must be given" in capsys.readouterr().out
