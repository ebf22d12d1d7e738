"""The end of `fourfold train` and `fourfold verify RUN`: a run with its report."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.cli.trained import Trained, again
from fourfold.training.outcome import TrainOutcome

WRITE_RUN = runpy.run_path(str(Path(__file__).parents[1] / "report" / "synthetic.py"))["write_run"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder of invented numbers."""
    return WRITE_RUN(tmp_path / "a run")


def test_the_end_names_the_validation_loss_the_forecast_and_the_report(run: Path) -> None:
    found = Trained.of(TrainOutcome(run, "z 2", steps=120, validation=2.9391), "again")
    rows = dict(line.split("  ", 1) for line in found.text().strip().splitlines())
    assert rows["validation loss"].strip() == "2.9391"
    assert rows["a step"].strip() == "50.0 ms; forecast 45.0 ms, 10.0% too low"
    assert rows["report"].strip() == str(run / "report.html")
    assert (run / "report.html").is_file()
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["ok"] and plain["report"]["report"] == str(run / "report.html")


def test_a_run_that_was_stopped_has_a_report_too(run: Path) -> None:
    command = "fourfold train a.yaml run.name=x --resume"
    text = Trained.of(TrainOutcome(run, "z 2", steps=7, stopped=True), command).text()
    assert text.startswith(f"stopped after 7 steps and saved; to go on: {command}\n")
    assert text.endswith(f"report {run / 'report.html'}")


def test_a_run_without_a_report_is_still_told(tmp_path: Path) -> None:
    found = Trained.of(TrainOutcome(tmp_path, "z 2", failed=True), "fourfold train a.yaml --resume")
    assert not found.ok
    assert "no report: " in found.text()
    assert "nothing was saved before that\n" in found.text()
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert "to go on from what was saved: fourfold train a.yaml --resume\n" in found.text()
    assert found.to_dict()["report"]["ok"] is False


def test_the_command_that_goes_on_is_the_one_that_was_given_with_the_name_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    given = ["run.folder=my runs", "run.name=other", "run.resume=true", 'data.files=["a.txt"]']
    command = again("examples/gpt text.yaml", given, "mine")
    assert command == (
        "fourfold train 'examples/gpt text.yaml' 'run.folder=my runs' 'data.files=[\"a.txt\"]' run.name=mine --resume"
    )
    monkeypatch.setenv("RANK", "0")
    assert again("a.yaml", [], "mine") == "under torchrun again, fourfold train a.yaml run.name=mine --resume"


@pytest.mark.parametrize("command", [["verify"], ["report"]])
def test_a_file_of_a_run_is_refused_with_the_name_of_its_folder(
    command: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.yaml").touch()
    (run / "report.html").write_text("<html>")
    assert main([*command, str(run / "report.html")]) == 2
    assert f"found the file 'report.html' in it; name the folder: {run}" in capsys.readouterr().err


def test_a_run_is_verified_as_it_was_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run), "train.steps=3"]) == 2
    assert "is verified as it was run" in capsys.readouterr().err


def test_the_verdict_on_a_run_lies_in_its_folder_and_in_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    run = WRITE_RUN(tmp_path / "run")
    (run / "verify.json").unlink()
    (run / "config.yaml").write_text(
        "model: {name: gpt, layers: 1, width: 16, heads: 2, context: 16}\n"
        f"data: {{name: text, files: ['{text}'], sequence: 16, vocabulary: 300, cache: '{tmp_path / 'cache'}'}}\n"
        "train: {steps: 2, batch: 4}\n"
        "plan: {placement: {z: 2, shard: parameters}}\n"
    )
    assert main(["verify", str(run), "--steps", "1", "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert json.loads((run / "verify.json").read_text()) == verdict
    assert verdict["verdict"] in (run / "report.html").read_text()
