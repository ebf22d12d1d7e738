"""Stock models each with something of its own that a grid has to know: one a line."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plain import VOCABULARY, Work, assert_equal, disturbed, lift_casts, on_threads, serial

from .test_refused import plan

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
DISTILLED = {"vocab_size": VOCABULARY, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 40}
ENCODING = {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "pad_token_id": 1}
DECODING = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 40}
BART = {"vocab_size": VOCABULARY, "d_model": 24, "max_position_embeddings": 40, **ENCODING, **DECODING}

CASTING = ("LayerNorm", "Attention")
MODELS: dict[str, tuple[str, dict[str, Any], tuple[dict[str, int], ...]]] = {
    "heads of a packed projection counted by a config": ("Phi3ForCausalLM", GROUPED, ({"y": 2}, {"x": 2, "y": 2})),
    "a norm with weights a head": ("CohereForCausalLM", {**GROUPED, "use_qk_norm": True}, ({"y": 2}, {"x": 2, "y": 2})),
    "a tied head behind a linear": ("RobertaForMaskedLM", {**SIZES, "pad_token_id": 1}, ({"y": 2}, {"x": 2, "y": 2})),
    "a tied head with its own bias": ("DistilBertForMaskedLM", DISTILLED, ({"y": 2}, {"x": 2, "y": 2})),
    "a buffer added to logits": ("BartForConditionalGeneration", BART, ({"y": 2}, {"y": 3})),
}


def loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Cross-entropy, of whichever kind the model is."""
    tokens, targets = batch["tokens"], batch["targets"]
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    logits = model(tokens, **more).logits.flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum"), int((targets != -100).sum())


@functools.cache
def work(name: str) -> Work:
    import transformers

    kind, settings, _ = MODELS[name]
    torch.manual_seed(0)
    built: type[nn.Module] = getattr(transformers, kind)
    model = built(built.config_class(**settings))  # type: ignore[operator]
    return Work(disturbed(model.double()), steps=2, loss=loss, prepare=lambda model: lift_casts(model, *CASTING))


PAIRS = [(name, grid) for name, (_, _, grids) in MODELS.items() for grid in grids]


@pytest.mark.parametrize(("name", "grid"), PAIRS, ids=str)
def test_it_equals_one_process(name: str, grid: dict[str, int]) -> None:
    for found in on_threads(work(name), plan(**grid)):
        assert_equal(found, serial(work(name)))
