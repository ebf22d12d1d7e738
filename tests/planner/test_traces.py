"""Models that decide by values cannot run on fake tensors: they are really run, shortened, and forecast as well."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, ViTConfig, ViTForImageClassification

from fourfold.planner import Subject, Traces, UnrunnableError
from fourfold.planner.trace import Settings
from fourfold.training.losses.cross_entropy import cross_entropy

MIXTRAL = MixtralConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=2,
    max_position_embeddings=16,
)
MIXTRAL._attn_implementation = MIXTRAL._experts_implementation = "eager"
VIT = ViTConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, image_size=16, patch_size=8
)


def test_mixtral():
    subject = Subject(
        lambda: MixtralForCausalLM(MIXTRAL), cross_entropy, {"tokens": torch.arange(34).view(2, 17) % 64}, 4
    )
    traces = Traces(subject)
    tape = traces.tape(Settings(4))
    assert len(tape.blocks) == 4
    assert sum(operator["flops"] for operator in tape.operators) > 0


def test_vit():
    def loss(model, batch):
        return model(batch["pixels"]).logits.sum(), len(batch["pixels"])

    traces = Traces(Subject(lambda: ViTForImageClassification(VIT), loss, {"pixels": torch.zeros(2, 3, 16, 16)}, 4))
    assert len(traces.tape(Settings(4)).blocks) == 4


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if float(x.sum()) > 1e9:
                x = x * 0
        return x


def test_the_long_way_says_why():
    subject = Subject(Deciding, lambda model, batch: (model(batch["x"]).sum(), 1), {"x": torch.ones(2, 4)}, 4)
    traces = Traces(subject)
    tape = traces.tape(Settings(4, streams=False))
    assert tape.blocks == [f"layers.{number}" for number in range(5)]
    assert traces.failures and all(failure.startswith("fake tensors: ") for failure in traces.failures)


def test_a_model_that_cannot_run_is_refused_with_its_reasons():
    def loss(model, batch):
        raise KeyError("no such column")

    subject = Subject(Deciding, loss, {"x": torch.ones(2, 4)}, 4, name="broken")
    with pytest.raises(UnrunnableError, match="broken: Deciding does not run on its own batch, .*no such column"):
        Traces(subject).tape(Settings(4))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": {}}, "at least one example tensor"),
        ({"batch": {"x": torch.ones(())}}, "dim 0 is the row"),
        ({"rows": 0}, "at least 1 row"),
        ({"optimizer": "adam"}, "one of adamw, sgd"),
    ],
)
def test_a_subject_that_cannot_be_is_refused(change, said):
    settings = {"build": Deciding, "loss": lambda *_: (0, 0), "batch": {"x": torch.ones(2, 4)}, "rows": 4, **change}
    with pytest.raises(ValueError, match=said):
        Subject(**settings)
