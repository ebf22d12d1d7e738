"""`verify` from a configuration: on threads, and on real gloo processes."""

import json

import numpy as np
import pytest

from fourfold.config import load
from fourfold.verify import ranks, verify

SMALL = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "model.dropout=0.1", "train.batch=4"]


@pytest.fixture
def loaded(tmp_path):
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 50, 2000).astype(np.uint16))
    (tmp_path / "config.yaml").write_text(
        f"data: {{name: tokens, files: ['{tmp_path}/ids.npy'], vocabulary: 50, sequence: 16}}\n"
        "plan: {placement: {z: 2, shard: parameters}}\n"
    )
    return load(str(tmp_path / "config.yaml"), SMALL)


def test_threads(loaded):
    found = verify(loaded, steps=2)
    assert found.ok and found.exact and found.plan.placement.precision == "fp64", found.text()
    assert found.worst.error <= 1e-12 and len(found.steps) == 2
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["ok"] and plain["ranks"] == 2 and all(row["equal"] for row in plain["bytes"])


def test_processes_say_what_threads_say(loaded):
    threads, processes = verify(loaded, steps=1), verify(loaded, steps=1, backend="gloo")
    assert processes.ok and processes.backend == "gloo"
    assert [step.loss for step in processes.steps] == [step.loss for step in threads.steps]
    assert processes.moved == threads.moved


def test_a_process_that_fails_is_named(loaded, monkeypatch):
    monkeypatch.setattr(ranks.sys, "executable", "/bin/false")
    with pytest.raises(ranks.RanksFailed, match="rank 0 of 2 ended with 1"):
        verify(loaded, steps=1, backend="gloo")


def test_bad_questions(loaded):
    with pytest.raises(ValueError, match="steps: expected at least 1, found 0"):
        verify(loaded, steps=0)
    with pytest.raises(ValueError, match="backend: expected threads or gloo, found 'mpi'"):
        verify(loaded, backend="mpi")
