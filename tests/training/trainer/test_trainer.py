"""The loop, for real: small runs in this process, alone and on thread ranks."""

import json
from pathlib import Path

import numpy as np
import pytest

from fourfold.config import Config
from fourfold.ledger import Ledger
from fourfold.training import checkpoint, folder
from fourfold.training.data import synthetic
from fourfold.training.folder import RunFolder
from fourfold.training.journal import read
from fourfold.training.tally import StepError
from fourfold.training.trainer import Ending
from fourfold.training.worker import Rank
from fourfold.wire import join, threads

STEPS = 6


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, synthetic(2000, 40))
    return path


def begin(root: Path, tokens: Path, plan: dict | None = None, **sections) -> RunFolder:
    config = Config.model_validate(
        {
            "model": {"layers": 2, "width": 16, "heads": 2, "context": 8, "dropout": 0.1},
            "data": {"name": "tokens", "files": [str(tokens)], "sequence": 8, "vocabulary": 40, "held_out": 0.1},
            "optimizer": {"lr": 0.01},
            "plan": {"placement": plan or {}},
        }
        | {"train": {"steps": STEPS, "batch": 4} | sections.pop("train", {})}
        | {"run": {"folder": str(root), "tensorboard": False} | sections.pop("run", {})}
        | sections
    )
    place = folder.create(config)
    place.write_config(config)
    return place


def train(place: RunFolder, stop=lambda: False) -> Ending:
    return Rank(place, stop=stop)(join())


class StopAfter:
    """Asks to stop in its n-th step."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def losses(place: RunFolder) -> list[float]:
    return [record["loss"] for record in read(place.journal) if record["kind"] == "step"]


def weights(place: RunFolder) -> dict[str, bytes]:
    newest = checkpoint.latest(place.checkpoints)
    assert newest is not None
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def test_a_run_writes_a_line_a_step_evaluates_saves_and_learns(tmp_path, tokens):
    place = begin(tmp_path, tokens, train={"steps": 40, "evaluate_every": 20}, run={"checkpoint_every": 15, "keep": 9})
    ending = train(place)
    records = read(place.journal)
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 41))
    assert [record["step"] for record in records if record["kind"] == "evaluation"] == [20, 40]
    assert [record["step"] for record in records if record["kind"] == "checkpoint"] == [15, 30, 40]
    assert all(record["count"] == 4 * 8 for record in records if record["kind"] == "step")
    assert (records[0]["kind"], records[-1]["kind"]) == ("start", "end")
    assert ending == Ending(40, False, records[-1]["validation"], None)
    assert losses(place)[-1] < losses(place)[0] - 0.5


def test_a_stopped_and_resumed_run_continues_bit_for_bit(tmp_path, tokens):
    whole = begin(tmp_path, tokens, run={"name": "whole"})
    train(whole)
    parts = begin(tmp_path, tokens, run={"name": "parts"})
    ending = train(parts, StopAfter(3))
    assert ending == Ending(3, True, None, None)
    ending = train(parts)
    assert ending.steps == STEPS
    assert losses(parts) == losses(whole)
    assert weights(parts) == weights(whole)
    assert [record["kind"] for record in read(parts.journal)].count("resume") == 1


def test_steps_after_the_checkpoint_are_taken_again_and_journalled_once(tmp_path, tokens):
    place = begin(tmp_path, tokens, run={"checkpoint_every": 2})
    train(place)
    before = losses(place)
    newest = checkpoint.latest(place.checkpoints)
    assert newest is not None
    newest.rename(tmp_path / "gone")
    train(place)
    assert losses(place) == before
    assert [record["step"] for record in read(place.journal) if record["kind"] == "step"] == list(range(1, STEPS + 1))


def test_a_finished_run_that_is_resumed_only_ends_again(tmp_path, tokens):
    place = begin(tmp_path, tokens)
    first = train(place)
    assert train(place) == first
    assert len(losses(place)) == STEPS


def test_thread_ranks_agree_with_one_process_and_only_the_first_journals(tmp_path, tokens):
    alone = begin(tmp_path, tokens, run={"name": "alone"})
    train(alone)
    plan = {"data": 1, "z": 3, "shard": "parameters"}
    place = begin(tmp_path, tokens, plan, run={"name": "three"})
    endings = threads.launch(3, lambda world: Rank(place, stop=lambda: False)(world))
    assert len(set(endings)) == 1
    np.testing.assert_allclose(losses(place), losses(alone), rtol=1e-5)
    assert len(losses(place)) == STEPS
    assert sorted(path.name for path in place.ledger.iterdir()) == [
        "formulas.json",
        "rank-0.json",
        "rank-1.json",
        "rank-2.json",
    ]


def test_one_rank_that_is_asked_stops_all_after_the_same_step(tmp_path, tokens):
    place = begin(tmp_path, tokens, {"data": 3})

    def body(world) -> Ending:
        return Rank(place, stop=StopAfter(4) if world.rank == 2 else lambda: False)(world)

    endings = threads.launch(3, body)
    assert {(ending.steps, ending.stopped) for ending in endings} == {(4, True)}


def test_a_loss_that_is_not_finite_ends_the_run_by_name_and_saves_nothing_over(tmp_path, tokens):
    optimizer = {"name": "sgd", "lr": 1e30, "clip": None, "decay": "constant"}
    place = begin(tmp_path, tokens, optimizer=optimizer, run={"checkpoint_every": 1})
    with pytest.raises(StepError, match=r"step \d: .*not finite on rank 0"):
        train(place)
    taken = len(losses(place))
    newest = checkpoint.latest(place.checkpoints)
    assert newest is None or int(newest.name.rpartition("-")[2]) <= taken
    assert all(np.isfinite(loss) for loss in losses(place))


def test_the_ledger_on_disk_holds_spans_of_a_few_warm_steps_and_every_steps_bytes(tmp_path, tokens):
    place = begin(tmp_path, tokens, {"data": 2})
    threads.launch(2, lambda world: Rank(place, stop=lambda: False)(world))
    ledger = Ledger.from_dict(json.loads((place.ledger / "rank-1.json").read_text()))
    assert [span.name for span in ledger.spans if span.lane == "step"] == ["step 2", "step 3", "step 4"]
    assert [span.name for span in ledger.spans if span.lane == "data"] == ["rows 2 to 4"] * 3
    assert {ledger.sent(step) for step in range(STEPS)} == {ledger.sent(0)}
    assert ledger.sent(0) > 0


def test_settings_of_a_log_line_are_kept(tmp_path, tokens):
    place = begin(tmp_path, tokens, run={"log_every": 4}, optimizer={"lr": 0.01, "warmup": 4, "decay": "constant"})
    train(place)
    steps = [record for record in read(place.journal) if record["kind"] == "step"]
    assert [(record["step"], record["lr"]) for record in steps] == [(4, 0.01), (6, 0.01)]
