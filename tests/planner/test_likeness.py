"""A traced model's numbers are those of the network that it is."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fourfold.models.gpt import GPT, Config
from fourfold.planner import Subject, Traces
from fourfold.planner.likeness import network
from fourfold.planner.network import Network
from fourfold.training.losses.cross_entropy import cross_entropy

TOKENS = {"tokens": torch.zeros(2, 17, dtype=torch.int64)}


def nameless(one: Network | None) -> Network:
    assert one is not None
    linears = tuple(dataclasses.replace(linear, name="") for linear in one.linears)
    return dataclasses.replace(one, name="", linears=linears)


def test_gpt():
    config = Config(vocabulary=96, context=16, layers=4, width=32, heads=4, dropout=0.1)
    found = network(Traces(Subject(lambda: GPT(config), cross_entropy, TOKENS, 8)))
    assert found is not None
    assert nameless(found) == nameless(Network.gpt(32, 4, 4, vocabulary=96, sequence=16))
    assert found is not None
    assert [linear.name for linear in found.linears] == [
        "attention.qkv",
        "attention.project",
        "mlp.expand",
        "mlp.contract",
    ]


def test_llama():
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        vocab_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    found = network(Traces(Subject(lambda: LlamaForCausalLM(config), cross_entropy, TOKENS, 8)))
    assert found is not None
    assert nameless(found) == nameless(Network.llama(32, 2, 4, 2, 64, vocabulary=96, sequence=16))
    assert found is not None
    assert found.linears[0].name == "self_attn.q_proj|k_proj|v_proj"


def test_a_model_without_blocks_has_none():
    subject = Subject(
        lambda: nn.Linear(4, 4), lambda model, batch: (model(batch["x"]).sum(), 1), {"x": torch.ones(2, 4)}, 4
    )
    assert network(Traces(subject)) is None
