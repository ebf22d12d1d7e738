"""Any causal LM of transformers, from a folder or a configuration: every slice is that of the saved model."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fourfold.training.loader import LoaderError, Weights, hf_causal_lm
from fourfold.training.safetensors_source import SafetensorsSource

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1}
ALL = {
    "llama": LLAMA,
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": GPT2,
    "neox": NEOX,
    "mixtral": MIXTRAL,
}


def write(folder: Path, settings: dict, **options) -> torch.nn.Module:
    """A model with random weights, saved by transformers."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    model.save_pretrained(folder, **options)
    return model


def assert_same(source: Weights | None, model: torch.nn.Module) -> None:
    """Every tensor of the model, read in three uneven slices."""
    assert source is not None
    for name, tensor in model.state_dict().items():
        flat = tensor.reshape(-1).double()
        cuts = [0, flat.numel() // 3 + 1, 2 * flat.numel() // 3, flat.numel()]
        parts = [source(name, a, b, torch.float64) for a, b in zip(cuts, cuts[1:], strict=False) if a <= b]
        assert torch.equal(torch.cat(parts), flat), name


@pytest.mark.parametrize("name", ALL)
def test_every_slice_is_that_of_the_saved_model(tmp_path, name):
    model = write(tmp_path, ALL[name])
    loaded = hf_causal_lm(tmp_path)
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    assert_same(loaded.weights, model)


def test_a_sharded_folder_with_an_index(tmp_path):
    model = write(tmp_path, LLAMA, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(hf_causal_lm(tmp_path).weights, model)


def test_a_base_models_keys_lack_the_prefix(tmp_path):
    """Files that were written by GPT2Model name `h.0…`, not `transformer.h.0…`; the head is tied, so absent."""
    model = write(tmp_path, GPT2)
    tensors = {
        key.removeprefix("transformer."): value for key, value in load_file(tmp_path / "model.safetensors").items()
    }
    assert "wte.weight" in tensors and "lm_head.weight" not in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(hf_causal_lm(tmp_path).weights, model)


@pytest.mark.parametrize("name", ALL)
def test_every_box_is_that_of_the_saved_model_and_is_no_copy(tmp_path, name):
    """Halves of every dim. The library gives views of the mapped file: what is not copied from them is never read."""
    model = write(tmp_path, ALL[name], max_shard_size="5KB")
    source = hf_causal_lm(tmp_path).weights
    assert isinstance(source, SafetensorsSource)
    for key, tensor in model.state_dict().items():
        for part in itertools.product(*[((0, size // 2), (size // 2, size - size // 2)) for size in tensor.shape]):
            offsets, sizes = zip(*part, strict=True) if part else ((), ())
            found = source.box(key, offsets, sizes, torch.float64)
            assert torch.equal(found, tensor[tuple(slice(o, o + s) for o, s in part)].double()), (key, part)
    assert not source._whole, "a weight was made whole"
    mapped = {place(file.get_slice(key)[...]) for file in source._opened.values() for key in file.keys()}
    assert {place(brick.view) for key in model.state_dict() for brick in source.unread(key).bricks} == mapped


def place(tensor: torch.Tensor) -> int:
    """Where a tensor's storage is: for one tensor of a mapped file it is always the same."""
    return tensor.untyped_storage().data_ptr()


def test_a_configuration_alone_has_no_weights_and_nothing_is_allocated():
    for attention in ("sdpa", "eager"):
        loaded = hf_causal_lm(LLAMA, attention=attention)
        assert loaded.weights is None and loaded.tokenizer is None
        assert loaded.settings._attn_implementation == attention
        assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in loaded.model.parameters())


def test_a_folder_with_a_configuration_only_has_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert hf_causal_lm(tmp_path).weights is None


def test_the_tokenizer_comes_along(tmp_path):
    from tokenizers import Tokenizer, models

    write(tmp_path, GPT2)
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    tokenizer = hf_causal_lm(tmp_path).tokenizer
    assert tokenizer is not None and tokenizer.encode("ab").ids == [0, 1]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(LoaderError, match=r"tokenizer.json: not a tokenizer"):
        hf_causal_lm(tmp_path)


def test_pickles_are_refused_with_a_remedy(tmp_path):
    write(tmp_path, GPT2)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(LoaderError, match=r"found pytorch_model.bin; pickles can run code.*save_pretrained"):
        hf_causal_lm(tmp_path)


def test_code_from_a_folder_is_never_run(tmp_path):
    settings = {
        **LLAMA,
        "model_type": "mine",
        "auto_map": {"AutoModelForCausalLM": "mine.Model", "AutoConfig": "mine.C"},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "mine.py").write_text("open('ran', 'w')")
    with pytest.raises(LoaderError, match="mine"):
        hf_causal_lm(tmp_path)
    assert not Path("ran").exists() and not (tmp_path / "ran").exists()


def test_missing_unexpected_and_shapes_are_named(tmp_path):
    write(tmp_path, LLAMA)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.wait"] = tensors.pop("model.norm.weight")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoaderError) as caught:
        hf_causal_lm(tmp_path)
    text = str(caught.value)
    assert "missing: 'model.norm.weight' (nearest in the files: 'model.norm.wait')" in text
    assert "unexpected: 'model.norm.wait' (nearest in the model: 'model.norm.weight')" in text
    assert "shape of 'model.layers.0.mlp.up_proj.weight': expected (24, 16), found (4, 4)" in text


def test_an_old_rotary_buffer_in_the_files_is_no_surprise(tmp_path):
    model = write(tmp_path, LLAMA)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(hf_causal_lm(tmp_path).weights, model)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "model_type"),
        ({"model_type": "lama"}, "lama"),
        ({**LLAMA, "hidden_size": "many"}, "transformers refuses it"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ([1], "model_type"),
    ],
)
def test_a_configuration_that_cannot_be_is_one_clear_error(tmp_path, settings, words):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(LoaderError, match=words):
        hf_causal_lm(tmp_path)


@pytest.mark.parametrize("text", [None, "{", ""])
def test_a_folder_without_a_readable_configuration(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(LoaderError, match=r"config.json: cannot be read"):
        hf_causal_lm(tmp_path)


def test_damaged_files_and_indices_are_named(tmp_path):
    whole = tmp_path / "whole"
    write(whole, LLAMA, max_shard_size="5KB")
    files = sorted(path.name for path in whole.glob("*.safetensors"))

    def broken(name: str) -> Path:
        shutil.copytree(whole, tmp_path / name)
        return tmp_path / name

    (broken("cut") / files[0]).write_bytes((whole / files[0]).read_bytes()[:-9])
    (broken("gone") / files[1]).unlink()
    (broken("index") / "model.safetensors.index.json").write_text("[]")
    outside = broken("outside") / "model.safetensors.index.json"
    outside.write_text(outside.read_text().replace(files[0], "../whole/" + files[0]))
    swapped = broken("swapped")
    (swapped / files[0]).write_bytes((whole / files[1]).read_bytes())
    for name, words in {
        "cut": f"{files[0]}: not a whole safetensors file",
        "gone": f"names '{files[1]}', which is not in",
        "index": "expected a mapping weight_map",
        "outside": "which is not in",
        "swapped": f"is in {files[0]}, where it is not",
    }.items():
        with pytest.raises(LoaderError, match=words):
            hf_causal_lm(tmp_path / name)
