"""Eight stock architectures, tiny, each with its dropouts on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZE, "vocab_size": 40, "max_position_embeddings": 16}
LLAMA = {**TEXT, "num_key_value_heads": 2, "attention_dropout": 0.1}
OPT = {"ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40, "max_position_embeddings": 16}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 16}
VIT = {**SIZE, "image_size": 8, "patch_size": 4, "num_labels": 5, "hidden_dropout_prob": 0.1}

SETTINGS: dict[str, tuple[str, str, dict]] = {
    "llama": ("AutoModelForCausalLM", "LlamaConfig", LLAMA),
    "qwen3": ("AutoModelForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 8}),
    "mistral": ("AutoModelForCausalLM", "MistralConfig", LLAMA),
    "mixtral": ("AutoModelForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 3}),
    "gpt2": ("AutoModelForCausalLM", "GPT2Config", GPT2),
    "opt": ("AutoModelForCausalLM", "OPTConfig", {**OPT, "hidden_size": 32, "word_embed_proj_dim": 32}),
    "bert": ("AutoModelForMaskedLM", "BertConfig", TEXT),
    "vit": ("AutoModelForImageClassification", "ViTConfig", {**VIT, "attention_probs_dropout_prob": 0.1}),
}
LAYERS = {
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "bert": "bert.encoder.layer",
    "vit": "vit.layers",
}


@dataclass(frozen=True)
class Architecture:
    """A stock model: how to build it, a batch of `rows`, and its loss."""

    name: str

    @property
    def layers(self) -> str:
        return LAYERS.get(self.name, "model.layers")

    def build(self) -> nn.Module:
        """As a user builds it: on the default device, initialised by transformers (which skips meta)."""
        import transformers

        loader, config, settings = SETTINGS[self.name]
        extra = {"experts_implementation": "eager"} if self.name == "mixtral" else {}
        built = getattr(transformers, config)(**settings)
        return getattr(transformers, loader).from_config(built, attn_implementation="sdpa", **extra)

    def batch(self, rows: int = 2) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        if self.name == "vit":
            return {"inputs": torch.rand(rows, 3, 8, 8, generator=generator)}
        return {"inputs": torch.randint(0, 40, (rows, 6), generator=generator)}

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        key = "pixel_values" if self.name == "vit" else "input_ids"
        extra = {} if self.name in ("vit", "bert") else {"use_cache": False}
        return model(**{key: batch["inputs"]}, **extra).logits

    @property
    def loss(self) -> Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, int]]:
        return lambda model, batch: (self.logits(model, batch).pow(2).sum(), 1)


@pytest.fixture(params=list(SETTINGS), scope="session")
def architecture(request: pytest.FixtureRequest) -> Architecture:
    import transformers

    transformers.logging.set_verbosity_error()
    return Architecture(request.param)
