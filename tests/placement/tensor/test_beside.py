"""What is no feature and joins some: slopes and scales of heads, buffers, masks by head; dealt as the features are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plain import VOCABULARY, Work, assert_equal, disturbed, lift_casts, on_threads, serial

from .test_refused import HIDDEN, WIDTH, Vectors, plan

GRIDS = ({"y": 2}, {"x": 2, "y": 2})


def exact(work: Work, grid: dict[str, int]) -> None:
    for found in on_threads(work, plan(**grid)):
        assert_equal(found, serial(work))


# ---- ALiBi

SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 24}
FALCON: dict[str, Any] = {**SHAPE, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True, "ffn_hidden_size": 40}
STOCK: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {**SHAPE, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "bloom, 3 heads": ("Bloom", {**SHAPE, "n_layer": 2, "n_head": 3}),
    "mpt": ("Mpt", {"vocab_size": VOCABULARY, "d_model": 24, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}),
    "falcon": ("Falcon", {**FALCON, "multi_query": False, "new_decoder_architecture": False}),
}


@functools.cache
def stock(name: str) -> Work:
    import transformers

    kind, settings = STOCK[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    prepare = functools.partial(lift, kind)
    return Work(disturbed(model.double()), steps=2, prepare=prepare)


def lift(kind: str, model: nn.Module) -> None:
    lift_casts(model, "Attention")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", STOCK)
def test_biases_by_distance_and_head_equal_one_process(name: str, grid: dict[str, int]) -> None:
    exact(stock(name), grid)
