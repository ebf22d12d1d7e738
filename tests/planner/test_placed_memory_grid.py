"""The forecast of memory on tensor grids against the allocators of real gloo ranks."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fourfold.hardware import Cluster, Device, Link
from fourfold.models.gpt import GPT, Config
from fourfold.plan import Plan
from fourfold.planner import Subject, Traces, forecast, measured_peak
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from plain import at_rest

ROWS, SEQUENCE, VOCABULARY = 8, 64, 768
LINK = Link("none", 1e-5, 1e9)
CLUSTER = Cluster(1, 2, Device("cpu_test", 2**34, 1e10, {"fp32": 1e11}, "none"), LINK, LINK)


def gpt() -> GPT:
    return GPT(Config(vocabulary=VOCABULARY, context=SEQUENCE, layers=5, width=96, heads=4))


def llama() -> LlamaForCausalLM:
    shape: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=96, intermediate_size=256, vocab_size=VOCABULARY, max_position_embeddings=64, **shape)
    )


MODELS = {"gpt": gpt, "llama": llama}


def batch(rows: int) -> dict[str, torch.Tensor]:
    tokens = torch.arange(rows * SEQUENCE).view(rows, SEQUENCE) % VOCABULARY
    return {"tokens": tokens, "targets": tokens}


def body(world: Any, name: str, settings: dict[str, Any]) -> tuple[int, int]:
    """(bytes at rest, peak above them) of a steady step: the least of three."""
    run = parallelize(MODELS[name](), cross_entropy, OptimizerOptions(), Plan.of(settings), world=world)
    data = batch(ROWS)
    for _ in range(2):
        run.step(data)
    gc.collect()
    return at_rest(run), min(measured_peak(lambda: run.step(data)).peak for _ in range(3))


@functools.cache
def traces(name: str) -> Traces:
    return Traces(Subject(MODELS[name], cross_entropy, batch(2), ROWS))


@pytest.mark.parametrize(
    "settings",
    [
        {"placement": {"tensor": {"algorithm": "4d", "y": 2}}},
        {"placement": {"tensor": {"algorithm": "4d", "x": 2}}},
        {"placement": {"tensor": {"algorithm": "4d", "x": 2}, "recompute": "full"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(gloo, name, settings):
    measured = gloo(2, body, name, settings, timeout=240)[0]
    found = forecast(traces(name), CLUSTER, Plan.of(settings))
    of_the_batch = sum(tensor.nbytes for tensor in batch(ROWS).values())
    print(
        name,
        settings,
        found.peak - of_the_batch,
        measured,
        (found.peak - of_the_batch) / sum(measured),
        found.ledger.memory,
        found.when,
    )
    assert (found.peak - of_the_batch) / sum(measured) == pytest.approx(1, abs=0.05)
