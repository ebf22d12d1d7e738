"""`train`, end to end: real worker processes, real kills, torchrun."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fourfold.config import Config, Loaded, load, resolved
from fourfold.planner import RefusedError
from fourfold.training import checkpoint, launch
from fourfold.training.choice import ChoiceError
from fourfold.training.data import CorpusError, synthetic
from fourfold.training.folder import FolderError, RunFolder
from fourfold.training.journal import read
from fourfold.training.launch import train
from fourfold.training.process import living
from fourfold.training.subject import SubjectError


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, synthetic(3000, 40))
    return path


def loaded(root: Path, tokens: Path, *, steps: int = 6, launch: dict | None = None, **sections) -> Loaded:
    settings = {
        "model": {"layers": 2, "width": 16, "heads": 2, "context": 8, "dropout": 0.1},
        "data": {"name": "tokens", "files": [str(tokens)], "sequence": 8, "vocabulary": 40, "held_out": 0.1},
        "train": {"steps": steps, "batch": 8},
        "plan": {"placement": {"data": 2}},
        "launch": launch or {},
    } | sections
    settings["run"] = {"folder": str(root), "tensorboard": False} | sections.get("run", {})
    path = tokens.with_name(f"{len(list(tokens.parent.iterdir()))}.yaml")
    path.write_text(resolved(Config.model_validate(settings)))
    return load(str(path))


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read(folder / "journal.jsonl") if record["kind"] == "step"}


def weights(folder: Path) -> dict[str, bytes]:
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def test_two_workers_train_and_the_run_folder_tells_all(tmp_path, tokens, capsys):
    outcome = train(loaded(tmp_path, tokens))
    assert outcome.ok
    assert (outcome.steps, outcome.stopped, outcome.failures) == (6, False, ())
    assert outcome.validation is not None
    assert sorted(losses(outcome.folder)) == list(range(1, 7))
    shown = capsys.readouterr().out
    assert "plan: data 2 (given)" in shown
    assert "step 6/6  loss" in shown
    for name in ("config.yaml", "origin.json", "ledger/forecast.json", "ledger/rank-1.json", "logs/agent.log"):
        assert (outcome.folder / name).is_file(), name
    assert RunFolder(outcome.folder).read_config().run.name == outcome.folder.name
    assert json.loads(json.dumps(outcome.to_dict()))["steps"] == 6


def test_one_of_four_workers_is_killed_and_the_run_ends_bit_for_bit_as_if_not(tmp_path, tokens):
    """The unkilled run is on threads, whose bits are those of gloo."""
    plan = {"placement": {"data": 2, "z": 2, "shard": "parameters"}}
    settings = {"plan": plan, "steps": 60}
    run = {"name": "whole", "checkpoint_every": 5}
    whole = train(loaded(tmp_path, tokens, run=run, launch={"backend": "threads"}, **settings))
    place = tmp_path / "killed"
    times = []

    def kill() -> None:
        while len(losses(place)) < 12:
            time.sleep(0.02)
        os.kill(living(place / "ranks" / "0")[2], signal.SIGKILL)
        times.append(time.monotonic())
        while not any(record["kind"] == "resume" for record in read(place / "journal.jsonl")):
            time.sleep(0.02)
        resumed = len(losses(place))
        while len(losses(place)) <= resumed:
            time.sleep(0.02)
        times.append(time.monotonic())

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    run = {"name": "killed", "checkpoint_every": 5}
    outcome = train(loaded(tmp_path, tokens, run=run, launch={"max_restarts": 2}, **settings))
    killer.join()
    print(f"the group was back {times[1] - times[0]:.1f} s after the kill")
    assert outcome.ok
    assert [failure.rank for failure in outcome.failures] == [2]
    assert "killed by SIGKILL" in outcome.text()
    assert losses(outcome.folder) == losses(whole.folder)
    assert weights(outcome.folder) == weights(whole.folder)


def test_under_torchrun_the_ranks_agree_on_one_folder(tmp_path, tokens):
    (tmp_path / "config.yaml").write_text(resolved(loaded(tmp_path / "runs", tokens).config))
    script = tmp_path / "joined.py"
    script.write_text(
        "import sys\n"
        "from fourfold.config import load\n"
        "from fourfold.training.launch import train\n"
        "print(train(load(sys.argv[1])).text())\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, str(tmp_path / "config.yaml")], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(losses(folder)) == list(range(1, 7))
    assert json.loads((folder / "origin.json").read_text())["launcher"]


def test_an_interrupted_run_saves_stops_and_can_be_resumed(tmp_path, tokens):
    plan = {"placement": {}}

    def interrupt() -> None:
        while len(losses(tmp_path / "mine")) < 5:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    outcome = train(loaded(tmp_path, tokens, steps=100_000, plan=plan, run={"name": "mine"}))
    assert outcome.ok
    assert outcome.stopped
    assert "to go on: the same command with run.name=mine --resume" in outcome.text()
    assert checkpoint.latest(tmp_path / "mine" / "checkpoints") is not None


def test_a_run_that_has_ended_is_not_resumed_and_nothing_is_touched(tmp_path, tokens):
    outcome = train(loaded(tmp_path, tokens, plan={"placement": {}}, run={"name": "mine"}))
    before = {path: path.stat().st_mtime_ns for path in outcome.folder.rglob("*")}
    again = {"name": "mine", "resume": True}
    for plan, steps in (({"placement": {}}, 6), ({"placement": {"data": 2}}, 6), ("auto", 5)):
        with pytest.raises(FolderError, match=rf"mine is already at step 6 of {steps}; raise train\.steps to go on"):
            train(loaded(tmp_path, tokens, plan=plan, steps=steps, run=again))
    assert {path: path.stat().st_mtime_ns for path in outcome.folder.rglob("*")} == before
    assert train(loaded(tmp_path, tokens, plan={"placement": {}}, steps=8, run=again)).steps == 8


def test_a_run_that_was_killed_after_its_last_step_may_end(tmp_path, tokens):
    outcome = train(loaded(tmp_path, tokens, plan={"placement": {}}, run={"name": "mine"}))
    journal = outcome.folder / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if json.loads(line)["kind"] not in ("end", "evaluation")))
    ended = train(loaded(tmp_path, tokens, plan={"placement": {}}, run={"name": "mine", "resume": True}))
    assert ended.validation == outcome.validation


def test_what_can_be_checked_before_the_launch_is_checked_there(tmp_path, tokens):
    with pytest.raises(
        ChoiceError, match=r"launch\.workers: the plan \(data 2\) needs 2, found 3; set launch\.workers=2"
    ):
        train(loaded(tmp_path, tokens, launch={"workers": 3}))
    empty = {"name": "text", "files": [str(tmp_path / "*.txt")]}
    with pytest.raises(CorpusError, match="matches no file"):
        train(loaded(tmp_path, tokens, data=empty, model={"context": 128}))
    assert list(tmp_path.iterdir()) == []


def test_a_grid_that_cannot_be_starts_nothing(tmp_path, tokens):
    """The forecast knows; no folder is made, and no rank started to find the same. Three for two heads: 1 is left."""
    with pytest.raises(
        RefusedError,
        match=r"^plan\.placement\.tensor: .* 2 heads over y = 3 .*; nearest grids of 3 that fit: x 3 y 1 z 1 data 1",
    ):
        train(loaded(tmp_path, tokens, plan={"placement": {"tensor": {"algorithm": "4d", "y": 3}}}))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def unplanned(monkeypatch):
    """Looking at plans takes seconds: here it is an error."""

    def choose(*_, **__):
        raise AssertionError("plans were looked at")

    monkeypatch.setattr(launch, "choose", choose)


@pytest.fixture
def unread(monkeypatch):
    """Reading and tokenizing the text takes seconds: here it is an error."""

    def prepare(*_, **__):
        raise AssertionError("the text was read")

    monkeypatch.setattr(launch, "prepare", prepare)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"caf\xe9 " * 100, r"own\.txt: expected UTF-8 text, found the byte 0xe9 at offset 3"),
        (b"", "the corpus is empty"),
        (b"seven", r"the training part has \d tokens, fewer than the 9 of one window"),
    ],
    ids=["latin-1", "empty", "short"],
)
def test_a_text_that_cannot_be_trained_on_is_refused_before_plans_are_looked_at(
    text, words, tmp_path, tokens, unplanned
):
    own = tmp_path / "own.txt"
    own.write_bytes(text)
    data = {"name": "text", "files": [str(own)], "sequence": 8, "vocabulary": 300, "cache": str(tmp_path / "cache")}
    with pytest.raises(CorpusError, match=words):
        train(loaded(tmp_path / "runs", tokens, data={**data, "held_out": 0.0}))
    assert not (tmp_path / "runs").exists()


def test_settings_are_checked_before_the_text_is_read(tmp_path, tokens, unread, unplanned):
    with pytest.raises(FolderError, match="no run at"):
        train(loaded(tmp_path, tokens, run={"name": "none", "resume": True}))
    with pytest.raises(FolderError, match="no run in"):
        train(loaded(tmp_path, tokens, run={"resume": True}))
    (tmp_path / "mine").mkdir()
    with pytest.raises(FolderError, match="mine is taken"):
        train(loaded(tmp_path, tokens, run={"name": "mine"}))
    with pytest.raises(ChoiceError, match="needs 2, found 3"):
        train(loaded(tmp_path, tokens, launch={"workers": 3}))
    small = {"name": "hf_causal_lm", "config": {"model_type": "gpt2", "vocab_size": 100}}
    with pytest.raises(SubjectError, match="at most the model's 100 tokens, found 300"):
        train(loaded(tmp_path, tokens, model=small, data={"name": "stdlib", "vocabulary": 300}))


def test_the_planner_chooses_where_the_plan_is_auto(tmp_path, tokens, capsys):
    settings = loaded(tmp_path, tokens, steps=2, plan="auto", launch={"workers": 2, "backend": "threads"})
    outcome = train(settings)
    assert outcome.ok
    shown = capsys.readouterr().out
    assert "(chosen: the fastest of" in shown
    assert "forecast: " in shown
    written = RunFolder(outcome.folder).read_config().plan
    assert isinstance(written, dict)
    assert written["placement"]["data"] * written["placement"]["z"] == 2
