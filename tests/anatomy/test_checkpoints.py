"""A model that checkpoints itself is noticed where backward would draw, or take statistics, once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.anatomy import survey
from fourfold.placement.refusals import PlacementError, refuse

BATCH = {"x": torch.zeros(2, 5, 8)}


def total(model: nn.Module, batch) -> tuple[Tensor, int]:
    return model(batch["x"]).sum(), 1


class Block(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.linear, self.inner, self.reentrant = nn.Linear(8, 8), inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant) if torch.is_grad_enabled() else self.inner(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", [nn.Dropout(0.1), nn.BatchNorm1d(5)], ids=["dropout", "batch norm"])
def test_what_would_be_drawn_again_is_refused(inner: nn.Module, reentrant: bool):
    model = nn.Sequential(Block(inner, reentrant), nn.Dropout(0.1))
    anatomy = survey(model, total, BATCH)
    assert anatomy.repeated == ("0.inner",)
    with pytest.raises(
        PlacementError, match=r"checkpoints itself .* in 0.inner, .* set plan.placement.recompute: full"
    ):
        refuse(model, anatomy, ranks=1)


@pytest.mark.parametrize("inner", [nn.Tanh(), nn.Dropout(0.0), nn.BatchNorm1d(5).eval()], ids=["tanh", "off", "frozen"])
def test_a_checkpoint_of_what_repeats_itself_is_fine(inner: nn.Module):
    model = nn.Sequential(Block(inner), nn.Dropout(0.1))
    model.train().get_submodule("0.inner").train(not isinstance(inner, nn.BatchNorm1d))
    anatomy = survey(model, total, BATCH)
    assert anatomy.repeated == ()
    refuse(model, anatomy, ranks=2)


def test_with_values_a_switch_that_is_on_is_enough():
    """As transformers has it: nothing is checkpointed without gradients, and the survey needs values here."""

    class Switched(Block):
        gradient_checkpointing = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if float(x.sum()) > -1e9 else -x)

    model = Switched(nn.Dropout(0.1))
    model.gradient_checkpointing = True
    anatomy = survey(model, total, BATCH)
    assert anatomy.traced == "real" and anatomy.repeated == ("inner",)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_stock_models(name: str, reentrant: bool):
    import transformers

    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=40, n_positions=16)
    else:
        sizes: dict[str, Any] = {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "vocab_size": 40}
        config = transformers.OPTConfig(num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).train()

    def logits(model: nn.Module, batch) -> tuple[Tensor, int]:
        return F.log_softmax(model(input_ids=batch["x"], use_cache=False).logits, -1).sum(), 1

    batch = {"x": torch.zeros(2, 6, dtype=torch.long)}
    assert survey(model, logits, batch).repeated == ()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    anatomy = survey(model, logits, batch)
    layers = "transformer.h" if name == "gpt2" else "model.decoder.layers"
    assert {".".join(path.split(".")[: layers.count(".") + 2]) for path in anatomy.repeated} == set(anatomy.blocks)
    assert anatomy.blocks == (f"{layers}.0", f"{layers}.1")
