"""Errors of the rooms below are blamed on the setting that they name, where it was written; and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.cli.settings import blaming, load
from fourfold.config import ConfigError
from fourfold.placement.refusals import PlacementError


def raised(path: Path, message: str) -> str:
    path.write_text("model:\n  layers: 1\nplan: {placement: {data: 2}}\n")
    loaded = load(str(path), ["plan.placement.data=3", "model.width=32", "model.heads=2"])
    with pytest.raises((ConfigError, PlacementError)) as found, blaming(loaded):
        raise PlacementError(message)
    return str(found.value).replace(str(path), "a.yaml")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("plan.placement.data: no", "command line: plan.placement.data: no"),
        ("plan.placement.z: no", "a.yaml:3: plan.placement.z: no"),
        ("model.layers: no", "a.yaml:2: model.layers: no"),
        ("model.norm.weight: 3 heads", "model.norm.weight: 3 heads"),  # a weight's name, no setting
        ("blocks.0.up.weight: 3 heads", "blocks.0.up.weight: 3 heads"),
    ],
)
def test_only_settings_are_blamed_and_where_they_were_written(tmp_path: Path, message: str, said: str) -> None:
    assert raised(tmp_path / "a.yaml", message) == said
