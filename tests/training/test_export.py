"""What is exported is what was trained: transformers loads it to the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from fourfold import wire
from fourfold.config import Config, resolved
from fourfold.training import subject
from fourfold.training.checkpoint import Box, CheckpointError, save
from fourfold.training.checkpoint.safetensors_file import header
from fourfold.training.export import ExportError, export
from fourfold.training.hf_writer import HfWriter
from fourfold.training.losses import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize

from .test_loader import GPT2, LLAMA, MIXTRAL, NEOX

GPT = {"name": "gpt", "layers": 2, "width": 24, "heads": 4, "context": 16}
CASES = {
    "gpt": GPT,
    "gpt, untied": {**GPT, "tie_embeddings": False},
    "gpt2": {"name": "hf_causal_lm", "config": GPT2},
    "llama": {"name": "hf_causal_lm", "config": LLAMA},
    "llama, tied": {"name": "hf_causal_lm", "config": {**LLAMA, "tie_word_embeddings": True}},
    "neox": {"name": "hf_causal_lm", "config": NEOX},
    "mixtral": {"name": "hf_causal_lm", "config": MIXTRAL},
}
DATA = {"name": "tokens", "files": ["none.npy"], "vocabulary": 40, "sequence": 12}


def boxes(model: nn.Module, rank: int, ranks: int) -> list[Box]:
    """Rows of every tensor cut over the ranks, ceil(rows / ranks) each; an optimizer state beside every weight."""
    found = []
    persistent = model.state_dict().keys()
    buffers = {f"buffer.{name}": tensor for name, tensor in model.named_buffers() if name in persistent}
    weights = {f"model.{name}": tensor for name, tensor in model.named_parameters()}
    states = {f"optimizer.exp_avg.{name}": tensor * 0.1 for name, tensor in model.named_parameters()}
    for name, tensor in (weights | buffers | states).items():
        tensor = tensor.detach()
        held = -(-tensor.shape[0] // ranks)
        first, last = min(rank * held, tensor.shape[0]), min((rank + 1) * held, tensor.shape[0])
        found.append(Box(name, tuple(tensor.shape), (first,) + (0,) * (tensor.dim() - 1), tensor[first:last]))
    return found


def trained(folder: Path, settings: dict, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A run folder with a checkpoint of three writers, and the model that it holds."""
    config = Config.model_validate({"model": settings, "data": DATA})
    torch.manual_seed(5)
    model = subject.builder(config)().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(resolved(config))
    savings = [
        save(folder / "checkpoints", 9, boxes(model, rank, 3), {"number": 9}, rank=rank, writers=range(3))
        for rank in range(3)
    ]
    for saving in savings:
        saving.wait()
    return model


def logits(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(24).view(2, 12) % 40
    with torch.no_grad():
        out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_the_same_logits(tmp_path, name):
    dtype = torch.float32 if name == "mixtral" else torch.float64  # torch has no grouped matmul in float64
    model = trained(tmp_path / "run", CASES[name], dtype)
    result = export(tmp_path / "run", tmp_path / "out")
    assert result.ok and result.step == 9 and result.files == ("model.safetensors",)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)  # pyright: ignore[reportGeneralTypeIssues]
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(loaded).__name__ == result.architecture
    assert loaded.dtype == dtype
    expected, found = logits(model), logits(loaded.eval())
    assert float((expected - found).abs().max()) <= (1e-12 if dtype == torch.float64 else 1e-5) * float(
        expected.abs().max()
    )
    if "gpt" not in name or name == "gpt2":
        for key, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], tensor), key


def on_a_grid(world: wire.World, folder: Path, settings: dict, tensor: dict[str, int]) -> dict[str, torch.Tensor]:
    """One step, and a checkpoint of it."""
    model, weights = subject.deferred_model(Config.model_validate({"model": settings, "data": DATA}))
    run = parallelize(
        model,
        cross_entropy,
        OptimizerOptions(),
        {"placement": {"precision": "fp32", "tensor": {"algorithm": "4d", **tensor}}},
        world=world,
        weights=weights,
    )
    run.step({"tokens": torch.arange(24).view(2, 12) % 40})
    run.save(folder)
    return run.logical_state()


def test_a_run_on_a_grid_comes_back_bit_for_bit(tmp_path, monkeypatch):
    """Tied weights, key-value heads shared by queries, eight writers that hold columns; little is held at a time."""
    settings = {"name": "hf_causal_lm", "config": {**LLAMA, "tie_word_embeddings": True}}
    tensor = {"x": 2, "y": 2, "z": 2}
    state = wire.threads.launch(8, on_a_grid, tmp_path / "run" / "checkpoints", settings, tensor)[0]
    (tmp_path / "run" / "config.yaml").write_text(resolved(Config.model_validate({"model": settings, "data": DATA})))
    held: list[int] = []
    flush = HfWriter._flush

    def watched(writer: HfWriter) -> None:
        held.append(sum(tensor.numel() * tensor.element_size() for tensor in writer._held.values()))
        flush(writer)

    monkeypatch.setattr(HfWriter, "_flush", watched)
    export(tmp_path / "run", tmp_path / "out", file_bytes=3000)
    assert len(held) > 3 and max(held) <= 3000
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = dict(loaded.named_parameters())
    assert found.keys() == state.keys()
    for name, weight in state.items():
        assert torch.equal(found[name], weight), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_published_names_are_written_where_the_architecture_packs_them(tmp_path):
    """Mixtral's experts are one tensor in the model and one a matrix in the files that everyone else reads."""
    trained(tmp_path / "run", CASES["mixtral"])
    export(tmp_path / "run", tmp_path / "out")
    assert "model.layers.0.block_sparse_moe.experts.2.w1.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_the_tied_head_is_written_once(tmp_path):
    trained(tmp_path / "run", CASES["gpt"])
    export(tmp_path / "run", tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_large_weights_go_into_several_files_with_an_index(tmp_path):
    model = trained(tmp_path / "run", CASES["llama"], torch.float32)
    result = export(tmp_path / "run", tmp_path / "out", file_bytes=4000)
    assert len(result.files) > 3
    assert all((tmp_path / "out" / file).stat().st_size <= 8000 for file in result.files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == result.bytes == sum(p.numel() * 4 for p in model.parameters())
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()))


def test_the_runs_tokenizer_comes_along(tmp_path):
    trained(tmp_path / "run", CASES["gpt"])
    Tokenizer(models.BPE({"<|end|>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")])).save(
        str(tmp_path / "run" / "tokenizer.json")
    )
    export(tmp_path / "run", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("abab").input_ids == [3, 3] and tokenizer.eos_token_id == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0


def test_a_folders_own_tokenizer_files_come_along(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text(json.dumps(LLAMA))
    Tokenizer(models.BPE({"a": 0}, [])).save(str(own / "tokenizer.json"))
    (own / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    trained(tmp_path / "run", {"name": "hf_causal_lm", "path": str(own)})
    result = export(tmp_path / "run", tmp_path / "out")
    assert result.notes == ()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (own / name).read_bytes()


def test_what_is_said_and_what_is_missing_is_noted(tmp_path):
    trained(tmp_path / "run", CASES["gpt"])
    result = export(tmp_path / "run", tmp_path / "out")
    assert "exported step 9" in result.text() and "as GPT2LMHeadModel" in result.text()
    assert "without a tokenizer" in result.text()
    assert json.loads(json.dumps(result.to_dict()))["folder"] == str(tmp_path / "out")


def test_nothing_but_an_earlier_export_is_ever_replaced(tmp_path):
    trained(tmp_path / "run", CASES["gpt2"])
    export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ExportError, match="expected an empty folder or none, .* with --overwrite"):
        export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"")
    export(tmp_path / "run", tmp_path / "out", overwrite=True)
    assert load_file(tmp_path / "out" / "model.safetensors")
    with pytest.raises(ExportError, match="expected an earlier export to replace"):
        export(tmp_path / "run", tmp_path / "run", overwrite=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExportError, match="found a file"):
        export(tmp_path / "run", tmp_path / "file", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out", "run"]


def test_a_run_without_a_checkpoint_and_one_of_another_model(tmp_path):
    trained(tmp_path / "run", CASES["gpt2"])
    other = {"model": {"name": "hf_causal_lm", "config": {**GPT2, "n_layer": 3}}, "data": DATA}
    (tmp_path / "run" / "config.yaml").write_text(resolved(Config.model_validate(other)))
    with pytest.raises(ExportError, match=r"missing 'model.transformer.h.2.*was config.yaml changed by hand"):
        export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ExportError, match="expected a whole checkpoint, found none"):
        export(tmp_path / "nothing", tmp_path / "out")


def test_a_damaged_checkpoint_leaves_no_export(tmp_path):
    trained(tmp_path / "run", CASES["gpt2"])
    file = tmp_path / "run" / "checkpoints" / "step-00000009" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    start = next(span for key, span in header(file).spans.items() if key.startswith("model.transformer.h.1.mlp"))[0]
    data[start] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="expected the hash"):
        export(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_check_after_writing_sees_every_difference(tmp_path):
    writer = HfWriter(tmp_path)
    writer.add("a", torch.arange(6.0).view(2, 3))
    writer.add("b", torch.zeros(2))
    (name,) = writer.finish()
    assert writer.differences({"a": (2, 3), "b": (2,)}) == []
    assert writer.differences({"a": (3, 2), "c": (2,)}) == [
        "missing 'c'",
        "shape of 'a': expected (3, 2), found (2, 3)",
        "unexpected 'b'",
    ]
    data = bytearray((tmp_path / name).read_bytes())
    data[-1] ^= 1
    (tmp_path / name).write_bytes(bytes(data))
    (problem,) = writer.differences({"a": (2, 3), "b": (2,)})
    assert problem.startswith("hash of ")
