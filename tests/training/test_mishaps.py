"""What goes wrong during a run or when it is resumed: the exit code, the words, and nothing that was saved is lost."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fourfold.cli import main
from fourfold.training import checkpoint
from fourfold.training.checkpoint.verification import check_all
from fourfold.training.data import synthetic
from fourfold.training.folder import RunFolder
from fourfold.training.journal import read

MISHAPS = Path(__file__).with_name("mishaps.py")
CONFIG = """
model: {layers: 2, width: 32, heads: 2, context: 8, dropout: 0.1}
data: {name: tokens, files: [tokens.npy], sequence: 8, vocabulary: 40, held_out: 0.1}
optimizer: {lr: 0.01}
train: {steps: 4, batch: 4}
plan: {placement: {}}
run: {name: mine, tensorboard: false, checkpoint_every: 1}
"""
RUN = RunFolder(Path("runs/mine"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with data and a config."""
    monkeypatch.chdir(tmp_path)
    np.save("tokens.npy", synthetic(2000, 40))
    Path("config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, trained once; each test gets a copy."""
    root = tmp_path_factory.mktemp("once")
    with contextlib.chdir(root), contextlib.redirect_stdout(io.StringIO()):
        np.save("tokens.npy", synthetic(2000, 40))
        Path("config.yaml").write_text(CONFIG)
        assert train() == 0
    return root


@pytest.fixture
def trained(folder: Path, once: Path) -> Path:
    """A run of four steps."""
    shutil.copytree(once, folder, dirs_exist_ok=True)
    return folder


def train(*more: str) -> int:
    return main(["train", "config.yaml", *more])


def files(root: Path) -> dict[str, bytes]:
    """Every file below, whole."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def losses() -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read(RUN.journal) if record["kind"] == "step"}


def newest() -> Path:
    found = checkpoint.latest(RUN.checkpoints)
    assert found is not None
    return found


def words(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said, on few lines and without a traceback."""
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert len(err.splitlines()) <= 24
    return out + err


# ---- resumed with other settings


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=2", r"seed changed since runs/mine was started \(seed was 1, is 2\)"),
        ("model.layers=3", r"model\.layers was 2, is 3"),
        ("data.held_out=0.2", r"data\.held_out was 0\.1, is 0\.2"),
        ("train.batch=8", r"train\.batch was 4, is 8"),
        ("optimizer.name=sgd", r"optimizer\.name was adamw, is sgd"),
        ("plan.placement.precision=fp64", r"plan\.placement\.precision was fp32, is fp64"),
    ],
)
def test_what_a_resumed_run_may_not_change(
    override: str, said: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(trained)
    assert train("--resume", override) == 2
    assert re.search(said, words(capsys))
    assert files(trained) == before


def test_what_a_resumed_run_may_change(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--resume", "train.steps=6", "optimizer.lr=0.02", "run.keep=2", "train.evaluate_batches=2") == 0
    said = words(capsys)
    assert "resumed with another optimizer.lr: 0.02, was 0.01" in said
    assert "resumed with another train.steps: 6, was 4" in said
    assert said.count("resumed with another") == 2
    assert sorted(losses()) == [1, 2, 3, 4, 5, 6]
    assert train("--resume", "train.steps=7", "optimizer.lr=0.02", "plan.placement.precision=bf16") == 0
    assert "resumed with another plan.placement.precision: bf16, was fp32" in words(capsys)


@pytest.mark.parametrize("more", [[], ["plan.placement.data=2"], ["train.steps=3"]])
def test_a_run_that_has_ended_is_left_as_it_is(
    more: list[str], trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(trained)
    assert train("--resume", *more) == 2
    assert re.search(r"runs/mine is already at step 4 of [34]; raise train\.steps to go on", words(capsys))
    assert files(trained) == before


# ---- checkpoints that are not what they should be


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_named_with_the_one_before_it_and_how_to_go_on_from_that(
    file: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, journal = losses(), RUN.journal.read_bytes()
    damaged = newest()
    flip(damaged / file)
    kept = files(RUN.checkpoints)
    assert train("--resume", "train.steps=6") == 2
    said = words(capsys)
    assert f"step-00000004/{file}" in said
    assert "step-00000003 is whole" in said
    assert files(RUN.checkpoints) == kept
    assert RUN.journal.read_bytes() == journal
    told = re.search(r"to resume from it, .*`(.*)`", said)
    assert told is not None
    subprocess.run(shlex.split(told[1]), check=True)
    assert train("--resume") == 0
    assert losses() == before
    check_all(newest())


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=2", "written with seed 2, this run has seed 1"),
        ("model.width=64", r"does not fit the run:\n  shape of 'model\."),
        ("model.layers=3", r"unexpected: 'model\.blocks\.2"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    override: str, said: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run.name=other", override) == 0
    shutil.rmtree(RUN.checkpoints)
    shutil.copytree("runs/other/checkpoints", RUN.checkpoints)
    journal = RUN.journal.read_bytes()
    capsys.readouterr()
    assert train("--resume", "train.steps=6") == 2
    assert re.search(said, words(capsys))
    assert RUN.journal.read_bytes() == journal


def test_a_run_without_any_checkpoint_begins_again(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = losses()
    shutil.rmtree(RUN.checkpoints)
    assert train("--resume") == 0
    assert losses() == before


# ---- disks


def refused(case: str, *more: str) -> subprocess.CompletedProcess[str]:
    """A `fourfold train` whose disk refuses, as a process of its own."""
    command = [sys.executable, str(MISHAPS), case, "config.yaml", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_disk_that_fills_up_loses_nothing_and_the_run_goes_on_when_there_is_room(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = files(RUN.checkpoints)
    done = refused("full", "--resume", "train.steps=8", "optimizer.decay=constant")
    assert done.returncode == 2
    assert "no room for the checkpoint in" in done.stderr
    assert "free some space" in done.stderr
    assert "Traceback" not in done.stderr
    assert kept.items() <= files(RUN.checkpoints).items()
    assert newest().name == "step-00000004"
    assert train("--resume", "train.steps=8", "optimizer.decay=constant") == 0
    assert sorted(losses()) == list(range(1, 9))
    check_all(newest())


def test_a_folder_that_cannot_be_written_is_named(trained: Path) -> None:
    for path in (Path("runs"), *Path("runs").rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = files(trained)
    try:
        for more in (["--resume", "train.steps=6"], ["run.name=new"]):
            done = refused("modes", *more)
            assert done.returncode == 2, done.stderr
            assert re.search(r"cannot (make|write) .*runs/.*Permission denied", done.stderr), done.stderr
            assert "Traceback" not in done.stderr
    finally:
        for path in (Path("runs"), *Path("runs").rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert files(trained) == before


# ---- data and numbers


def test_an_empty_corpus_makes_no_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.txt").touch()
    Path("config.yaml").write_text("data: {name: text, files: [empty.txt]}\nplan: {placement: {}}\n")
    assert train() == 2
    assert "corpus is empty" in words(capsys)
    assert not Path("runs").exists()


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_numbers_that_are_not_finite_end_the_run_and_leave_the_checkpoints(
    backend: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = 'plan={placement={data=2}, schedule={name="accumulate", microbatches=1}}'
    more = [plan, "launch.backend=threads"] if backend == "threads" else []
    assert train('optimizer={name="sgd", lr=1e30, decay="constant"}', "optimizer.clip=null", *more) == 1
    said = words(capsys)
    assert re.search(r"failed: rank [01](, step \d)?: .*not finite on rank", said)
    assert "to go on from what was saved: fourfold train config.yaml " in said
    assert "run.name=mine --resume\n" in said
    taken = losses()
    assert all(np.isfinite(loss) for loss in taken.values())
    if RUN.checkpoints.exists() and (found := checkpoint.latest(RUN.checkpoints)):
        check_all(found)


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_step_saves_stops_and_loses_nothing(
    number: signal.Signals, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def soon(there: Callable[[], bool]) -> None:
        while not there():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    killer = threading.Thread(target=soon, args=(lambda: len(losses()) >= 5,), daemon=True)
    killer.start()
    assert train("train.steps=100000", "optimizer.decay=constant", "run.checkpoint_every=2") == 0
    killer.join()
    said = words(capsys)
    settings = "train.steps=100000 optimizer.decay=constant run.checkpoint_every=2"
    assert f"and saved; to go on: fourfold train config.yaml {settings} run.name=mine --resume\n" in said
    steps = losses()
    assert sorted(steps) == list(range(1, len(steps) + 1))
    assert newest().name == f"step-{len(steps):08d}"
    check_all(newest())
    for name in ("config.yaml", "origin.json", "journal.jsonl", "ledger/rank-0.json"):
        assert (RUN.path / name).stat().st_size > 0
