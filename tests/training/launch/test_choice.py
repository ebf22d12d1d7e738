"""Workers that must share cores: a line says so, in `train` and in `plan`, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.config import Config
from fourfold.planner.here import cluster_file, loaded
from fourfold.training import choice
from fourfold.training.choice import choose, crowded

CONFIG = "model: {layers: 1, width: 16, heads: 2, context: 8}\ndata: {name: stdlib, sequence: 8, vocabulary: 300}\n"
LINE = "4 workers on 2 cores: they take turns, and wait for one another; a step takes longer than with 2 workers"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "cores", lambda: 2)


@pytest.mark.parametrize(
    ("workers", "threads", "lines"),
    [
        (1, 1, ()),
        (2, 1, ()),
        (1, 2, ()),
        (4, 1, (LINE,)),
        (2, 3, ("2 workers of 3 threads on 2 cores: they take turns, and wait for one another; set launch.threads=1",)),
        (1, 4, ("1 worker of 4 threads on 2 cores: they take turns, and wait for one another; set launch.threads=2",)),
    ],
)
def test_a_line_says_how_many_share_how_many_cores(workers: int, threads: int, lines: tuple[str, ...]) -> None:
    assert crowded(workers, threads) == lines


@pytest.mark.parametrize("plan", ["auto", {"placement": {"data": 4}}])
def test_train_says_so_beside_the_plan(plan: object) -> None:
    settings = {"model": {"layers": 1, "width": 16, "heads": 2, "context": 8}, "data": {"sequence": 8}}
    config = Config.model_validate(settings | {"plan": plan, "launch": {"workers": 4}})
    assert LINE in choose(config).why


@pytest.mark.parametrize("hardware", ["here", "4x rtx4090"])
def test_train_says_that_the_machine_was_busy_when_it_was_looked_at(
    hardware: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (20.4, 1.0, 1.0))
    settings = {"model": {"layers": 1, "width": 16, "heads": 2, "context": 8}, "data": {"sequence": 8}}
    config = Config.model_validate(settings | {"plan": {"placement": {}}, "hardware": hardware})
    line = "the machine was busy when it was looked at (load 20 on 2 cores): times are unreliable"
    assert (line in choose(config).why) == (hardware == "here")


@pytest.mark.parametrize(("load", "measured", "said"), [(1.9, False, ""), (3.0, False, "was"), (3.0, True, "is")])
def test_a_load_above_the_cores_is_told_and_whether_it_was_measured(
    load: float, measured: bool, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    cluster_file().parent.mkdir()
    if measured:
        cluster_file().touch()
    assert [line.split()[2] for line in loaded()] == ([said] if said else [])


def test_plan_says_so_below_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(CONFIG + "plan: {placement: {data: 4}}\n")
    for more in ([], ["--json"]):
        assert main(["plan", str(tmp_path / "a.yaml"), *more]) == 0
        said, progress = capsys.readouterr()
        assert progress == "looking at plans: up to minutes for many workers\n"
        found = json.loads(said)["notes"] if more else " ".join(said.split())
        assert LINE in found
    assert main(["plan", str(tmp_path / "a.yaml"), "hardware=4x rtx4090"]) == 0
    assert "take turns" not in capsys.readouterr().out
