"""Exit codes, JSON, and what happens to errors: every command is one function that says how it ended."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import commands, main, outcome
from fourfold.cli.outcome import Listing
from fourfold.plan import PlanError


class RunFailed(RuntimeError):
    """Stands for an exception of fourfold that is not the user's mistake."""


RunFailed.__module__ = "fourfold.training.somewhere"


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | outcome.Outcome], None]:
    """Makes `fourfold config schema` end in an exception or an outcome."""

    def set_end(end: Any) -> None:
        def show(*_: object) -> int:
            if isinstance(end, BaseException):
                raise end
            return outcome.show(end, "--json" in sys.argv)

        monkeypatch.setattr(commands, "show", show)

    return set_end


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (PlanError("plan.placement.z: wrong"), 2, "plan.placement.z: wrong"),
        (RunFailed("rank 1 is gone"), 1, "rank 1 is gone"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x/y"), 2, "No such file: x/y; check the path"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 2, "check its permissions"),
        (OSError(errno.EROFS, "Read-only file system", "x"), 2, "can be written"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 1, "free some space"),
        (OSError(errno.EADDRINUSE, "Address already in use"), 1, "launch.address=null"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_errors_become_codes_and_words(
    error: BaseException,
    code: int,
    says: str,
    ends: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ends(error)
    assert main(["config", "schema"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize("error", [ValueError("inner"), RuntimeError("inner"), ZeroDivisionError("inner")])
def test_a_defect_is_one_line_and_the_path_of_its_traceback(
    error: Exception,
    ends: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ends(error)
    assert main(["config", "schema"]) == 3
    err = capsys.readouterr().err
    assert err.startswith(f"{type(error).__name__}: inner\n")
    kept = Path(err.rpartition("traceback: ")[2].strip())
    assert kept.parent == tmp_path
    assert "Traceback" in kept.read_text()


def test_with_json_an_error_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "optimizer.lrr=1", "--json"]) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["ok"], found["exit_code"]) == (False, 2)
    assert [(problem["origin"], problem["key"]) for problem in found["problems"]] == [("command line", "optimizer.lrr")]
    assert found["error"] in err


def test_what_does_not_hold_is_exit_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome.show(Listing("things", ("a", "b"), ok=False), as_json=False) == 1
    assert capsys.readouterr().out == "a\nb\n"
    assert outcome.show(Listing("things", ("a", "b")), as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"things": ["a", "b"]}


def test_json_has_no_nan() -> None:
    value = {"loss": float("nan"), 1: [float("inf"), 2.5], "path": Path("a")}
    assert json.loads(outcome.encode(value)) == {"loss": None, "1": [None, 2.5], "path": "a"}


def test_under_json_what_is_printed_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with outcome.printing(True):
        print("progress")
    with outcome.printing(False):
        print("result")
    assert capsys.readouterr() == ("result\n", "progress\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian", "a.yaml"], 'Did you mean "train"?'),
        (["train"], "CONFIG"),
        (["train", "a.yaml", "--train.steps=3"], "without dashes: train.steps="),
        (["train", "a.yaml", "--resum"], "--resum"),
        (["verify", "a.yaml", "--steps", "few"], "--steps"),
        (["verify", "a.yaml", "--steps", "0"], "--steps: expected a whole number of at least 1"),
        (["verify", "a.yaml", "--backend", "glo"], 'Did you mean "gloo"?'),
        (["report"], "RUN"),
        (["report", "nowhere"], "expected a run's folder, found no 'nowhere'"),
        (["export", "nowhere", "there"], "expected a run's folder"),
        (["export", "nowhere", "there", "--axonn", "2", "2"], "--axonn requires 3"),
        (["export", "nowhere", "there", "--axonn", "2", "2", "1", "--overwrite"], "cannot be had with --axonn"),
        (["config", "shw"], 'Did you mean "show"?'),
        (["config", "explain"], "KEY"),
        (["config", "explain", "train.stepz"], "did you mean 'steps'?"),
        (["config", "explain", "train.steps.x"], "has no setting 'x'"),
        (["config", "explain", "plan.placement.shart"], "did you mean 'shard'?"),
        (["config", "explain", "plan.plcement"], "did you mean 'placement'?"),
        (["doctor", "extra"], "extra"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_code_two(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


def test_show_prints_a_config_that_is_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "show", "seed=9"]) == 0
    first = capsys.readouterr().out
    Path("again.yaml").write_text(first)
    assert main(["config", "show", "again.yaml"]) == 0
    assert capsys.readouterr().out == first
    assert main(["config", "show", "again.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 9


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["additionalProperties"] is False


HEAVY = "import sys; from fourfold.cli import main; code = main({arguments}); print(sorted(set(sys.modules) & {heavy}))"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["config", "--help"], []])
def test_help_and_version_import_neither_torch_nor_pydantic(arguments: list[str]) -> None:
    heavy = {"torch", "pydantic", "pydantic_core", "numpy", "yaml", "jinja2", "transformers", "fourfold.config"}
    script = HEAVY.format(arguments=arguments, heavy=heavy)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]"
    assert len(done.stdout.splitlines()) > 1


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fourfold", "config", "schema"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_plan_as_json_says_whether_some_plan_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("model: {layers: 1, width: 8, heads: 1, context: 8}\ndata: {sequence: 8}\n")
    given = [str(tmp_path / "a.yaml"), "plan.placement.data=2", "hardware=2x rtx4090"]
    for rows, ok in ((1, False), (2, True)):
        code = main(["plan", *given, f"train.batch={rows}", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert (code, found["ok"], found["best"] is not None) == (int(not ok), ok, ok)
