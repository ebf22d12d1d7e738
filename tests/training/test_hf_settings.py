"""Settings of transformers that would be kept and not read are refused; what transformers knows passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from fourfold.cli import main
from fourfold.training.hf_settings import check
from fourfold.training.safetensors_source import LoaderError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 270,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"num_key_value_head": 2}, r"model\.config\.num_key_value_head: .*did you mean 'num_key_value_heads'"),
        (
            {"hiden_size": 2, "wrong_one": 1},
            r"model\.config\.hiden_size: .* 'hidden_size'.*; nor of 'wrong_one'; correct or",
        ),
        ({"dtype": "bfloat16"}, r"model\.config\.dtype: .* found 'bfloat16': .* plan\.placement\.precision"),
        ({"torch_dtype": "float32"}, r"model\.config\.torch_dtype: .* plan\.placement\.precision"),
    ],
)
def test_what_has_no_effect_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(LoaderError, match=words):
        check(LLAMA | more)


@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", "gpt_neox", "mixtral", "qwen3", "t5", "gemma2", "opt", "bloom", "phi3"]
)
def test_what_transformers_itself_writes_is_taken(kind: str) -> None:
    written = AutoConfig.for_model(kind).to_dict()
    check({name: value for name, value in written.items() if name not in ("dtype", "torch_dtype")})


def test_other_names_and_old_names_are_taken() -> None:
    check(LLAMA | {"rope_theta": 1e4, "rope_scaling": None, "bos_token_id": 1, "temperature": 0.6, "_attn": 1})
    check(LLAMA | {"architectures": ["LlamaForCausalLM"], "use_cache": False, "dtype": None, "num_labels": 2})
    check({"model_type": "gpt2", "n_embd": 24, "n_head": 4, "n_layer": 2, "hidden_size": 24})
    check({"model_type": "no such"})  # transformers says so


def written(folder: Path, model: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(
        f"model:\n  name: hf_causal_lm\n  config: {model}\nrun: {{folder: {folder / 'runs'}}}\n", encoding="utf-8"
    )
    return path


def test_a_misspelled_setting_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "{model_type: gpt2, n_embed: 24}")
    assert main(["train", str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"config\.yaml:3: model\.config\.n_embed: .*did you mean 'n_embd'", said)
    assert not (tmp_path / "runs").exists()


def test_heads_that_do_not_share_leave_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "{model_type: llama, num_attention_heads: 6, num_key_value_heads: 4, hidden_size: 48}")
    assert main(["train", str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "expected num_attention_heads (6) to be a multiple of num_key_value_heads, found 4; try " in said
    assert "num_key_value_heads: 2 or 3" in said and not (tmp_path / "runs").exists()


def test_a_model_that_does_not_run_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rotary tables that are wider than its heads."""
    model = (
        "{model_type: gpt_neox, vocab_size: 300, hidden_size: 24, intermediate_size: 24, num_hidden_layers: 1, "
        "num_attention_heads: 8, rotary_pct: 2.0}"
    )
    data = "data={name='text',files=['%s'],sequence=16,vocabulary=262}" % (tmp_path / "text.txt")
    (tmp_path / "text.txt").write_text("".join(f"line {number}\n" for number in range(300)), encoding="utf-8")
    assert main(["train", str(written(tmp_path, model)), data, "plan.placement.data=2", "train.batch=2"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "GPTNeoXForCausalLM does not run on its own batch, before any plan: RuntimeError: " in said
    assert not (tmp_path / "runs").exists()
