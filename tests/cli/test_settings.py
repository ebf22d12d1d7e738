"""What commands say of settings and folders: errors are blamed on what they name, where it was written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fourfold.cli.settings import blaming, load, run_folder
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


def test_a_run_that_is_not_there_names_the_newest_that_are(tmp_path: Path) -> None:
    for number, name in enumerate(("qqq", "aaa", "zzz", "mmm", "no-run")):
        (tmp_path / name).mkdir()
        if name != "no-run":
            config = tmp_path / name / "config.yaml"
            config.touch()
            os.utime(config, (number, number))
    with pytest.raises(ConfigError) as found:
        run_folder(str(tmp_path / "20261201"))
    said = str(found.value).replace(f"{tmp_path}/", "runs/")
    assert said.endswith(
        "found no 'runs/20261201' (the newest there: runs/mmm, runs/zzz, runs/aaa); runs lie in run.folder"
    )
    with pytest.raises(ConfigError, match=r"\(did you mean 'zzz'\?\)"):
        run_folder(str(tmp_path / "zzx"))
