"""Runs on a tensor grid from a configuration: bad sizes in words, and whole lives of real models on gloo processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fourfold.cli import main
from fourfold.config import load
from fourfold.placement.tensor import trial
from fourfold.report import recorded, tables
from fourfold.training import checkpoint
from fourfold.training.checkpoint import Box
from fourfold.verify.compare import verify

LLAMA = {
    "name": "hf_causal_lm",
    "config": {
        "model_type": "llama",
        "vocab_size": 270,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
}
GPT = {"name": "gpt", "layers": 2, "width": 24, "heads": 4, "context": 16, "dropout": 0.1}
MODELS = {"llama": LLAMA, "gpt": GPT}


def written(folder: Path, model: dict[str, Any], tensor: dict[str, Any], **placement: Any) -> Path:
    """A configuration of a few steps on some text of its own."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {number} says {number * number}\n" for number in range(300)), encoding="utf-8")
    config = {
        "model": model,
        "data": {"name": "text", "files": [str(text)], "sequence": 12, "vocabulary": 262, "held_out": 0.1},
        "optimizer": {"name": "adamw", "lr": 1e-2, "eps": 1e-4, "warmup": 2, "decay": "constant"},
        "train": {"steps": 4, "batch": 4, "sample": {"prompt": "line ", "tokens": 3}},
        "run": {"folder": str(folder / "runs"), "name": "a", "log_every": 1},
        "plan": {"placement": {"tensor": {"algorithm": "4d", **tensor}, **placement}},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("backend", ["threads", pytest.param("gloo", marks=pytest.mark.long)])
def test_heads_that_do_not_fit_end_in_words(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, GPT, {"y": 5})
    assert main(["train", str(path), f"launch.backend={backend}"]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "blocks.0.attention.qkv.weight: 4 heads over y = 5" in words and "at most 4" in words
    assert not list((tmp_path / "runs" / "a" / "checkpoints").glob("step-*"))


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record["loss"] for record in records if record["kind"] == "step"]


def test_tuned_kernels_and_chunks_train_alike_and_the_report_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where a grid was not tried on numbers, the journal says so."""
    monkeypatch.setattr(trial, "MOST_PRODUCTS", 1)
    path = written(tmp_path, GPT, {"x": 2, "y": 2}, precision="fp64")
    steps = ["launch.backend=threads", "train.steps=5", "train.sample=null"]
    assert main(["train", str(path), *steps]) == 0
    tuned = ["plan.placement.kernels=tuned", "plan.placement.chunks=2", "run.name=tuned"]
    assert main(["train", str(path), *steps, *tuned]) == 0
    runs = tmp_path / "runs"
    assert losses(runs / "tuned") == pytest.approx(losses(runs / "a"), rel=1e-12)
    page = (runs / "tuned" / "report.html").read_text(encoding="utf-8")
    assert "Kernels of cut linears" in page and "What hides behind compute" in page
    assert "the grid was not tried on numbers: " in page
    assert "Kernels of cut linears" not in (runs / "a" / "report.html").read_text(encoding="utf-8")


def test_a_run_goes_on_under_another_grid_and_its_report_is_of_the_last_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so, and what was measured before is set aside; a forecast names every message of a step."""
    path = written(tmp_path, GPT, {"x": 2, "y": 2})
    steps = ["launch.backend=threads", "train.sample=null"]
    assert main(["train", str(path), *steps, "train.steps=3"]) == 0
    capsys.readouterr()
    grid = 'plan.placement.tensor={algorithm="2d",q=2}'
    assert main(["train", str(path), *steps, "train.steps=9", grid, "--resume"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    aside = tmp_path / "runs" / "a" / "ledger" / "earlier-1"
    line = f"plan: 2d q 2, z 2 shard parameters, was 4d x 2 y 2; what that one measured is in {aside}"
    assert line in said and "resumed with another plan" not in said
    assert sorted(path.name for path in aside.glob("rank-*")) == [f"rank-{rank}.json" for rank in range(4)]

    run = recorded.read(tmp_path / "runs" / "a")
    assert run.earlier == ((1, 3, "4d x 2 y 2"),)
    assert [record["step"] for record in run.now("step")] == [4, 5, 6, 7, 8, 9]
    assert [record["step"] for record in run.of("step")] == list(range(1, 10))
    rows = tables.matrix(run.ledgers, run.forecast)
    assert rows and all(row.equal for row in rows), "bytes are as forecast, those of control too"
    page = " ".join((run.path / "report.html").read_text(encoding="utf-8").split())
    assert "steps 1 to 3 ran under <code>4d x 2 y 2</code>" in page and "<code>ledger/earlier-1</code>" in page


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_train_go_on_under_another_grid_and_export(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes; equal to one process, but for the float32 in which Llama computes norms."""
    path = written(tmp_path, MODELS[name], {"x": 2, "y": 2}, precision="fp64")
    assert main(["train", str(path)]) == 0
    more = ["train.steps=6", 'plan.placement.tensor={algorithm="4d", x=3}']
    assert main(["train", str(path), "--resume", *more]) == 0
    assert "line " in capsys.readouterr().out
    alone = ["plan.placement.tensor=null", "run.name=alone", "train.steps=6"]
    assert main(["train", str(path), *alone]) == 0
    runs = tmp_path / "runs"
    found, expected = losses(runs / "a"), losses(runs / "alone")
    assert len(found) == 6
    assert found == pytest.approx(expected, rel=1e-12 if name == "gpt" else 1e-5)
    assert main(["export", str(runs / "a"), str(tmp_path / "out")]) == 0
    if name == "llama":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        newest = checkpoint.latest(runs / "a" / "checkpoints")
        assert newest is not None
        for weight, value in model.named_parameters():
            saved = torch.zeros(value.shape, dtype=torch.float64)
            checkpoint.load(newest, [Box.whole(f"model.{weight}", saved)], strict=False)
            assert torch.equal(value.double(), saved.to(value.dtype).double())


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_verify_on_real_processes(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, MODELS[name], {"x": 2, "y": 2})
    found = verify(load(str(path)), steps=2, backend="gloo")
    assert found.ok and found.bytes_equal, found.text()
    assert found.allowed == (1e-12 if name == "gpt" else 1e-5)
    assert ("computes in float32 whatever it is given" in found.text()) == (name == "llama")
