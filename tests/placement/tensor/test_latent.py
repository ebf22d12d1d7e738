"""Latent attention: a whole linear makes keys that all heads share, and every rank uses them for its own heads."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch

from fourfold.anatomy import Shared, restored, survey
from plain import VOCABULARY, Work, _lift, assert_equal, disturbed, forgive_routing, lift_casts, on_threads, serial


@functools.cache
def latent() -> Work:
    """A tiny DeepSeek V3 without experts: latents of 12 features, and 4 features of position for all heads."""
    import transformers

    config = transformers.DeepseekV3Config(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        q_lora_rank=10,
        kv_lora_rank=12,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=6,
    )
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM._from_config(config, attn_implementation="sdpa")
    return Work(disturbed(model.double()), steps=2, prepare=lift_casts)


def test_the_shared_keys_of_a_latent_have_partial_gradients() -> None:
    ours = latent()
    anatomy = survey(ours.fresh(), ours.loss, ours.batch(0))
    outputs = {f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa:0" for layer in range(2)}
    assert restored(json.loads(json.dumps(dataclasses.asdict(anatomy)))) == anatomy
    assert anatomy.shared == dict.fromkeys(outputs, Shared("y", ((12, 16),)))


@pytest.mark.parametrize("tensor", ({"y": 2}, {"x": 2, "y": 2}, {"y": 3}), ids=str)
def test_latent_attention_on_grids_equals_one_process(tensor: dict[str, int]) -> None:
    for outcome in on_threads(latent(), {"placement": {"precision": "fp64", "tensor": {"algorithm": "4d", **tensor}}}):
        assert_equal(outcome, serial(latent()))


@functools.cache
def complex_positions() -> Work:
    """A tiny DeepSeek V2: a query without latents, positions as complex numbers of 32 bits, and experts by a gate."""
    import transformers

    config = transformers.DeepseekV2Config(
        hidden_size=24,
        intermediate_size=40,
        moe_intermediate_size=10,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_routed_experts=3,
        num_experts_per_tok=2,
        n_shared_experts=1,
        topk_method="greedy",
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        q_lora_rank=None,
        kv_lora_rank=12,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=6,
    )
    torch.manual_seed(0)
    ways = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    model = transformers.DeepseekV2ForCausalLM._from_config(config, **ways)
    return Work(disturbed(model.double()), steps=2, prepare=_lift)


def test_deepseek_v2_equals_one_process_where_nothing_is_rounded_to_32_bits() -> None:
    """Its attention turns queries and keys, and its gate weighs experts, in float32: so it is some 1e-7 off else."""
    plan = {"placement": {"precision": "fp64", "tensor": {"algorithm": "4d", "x": 2, "y": 2}}}
    for outcome in on_threads(complex_positions(), plan):
        forgive_routing(outcome)
        assert_equal(outcome, serial(complex_positions()))
