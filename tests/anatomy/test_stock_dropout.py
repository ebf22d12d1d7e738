"""Eight stock models in training draw the same masks however their rows are cut, and when they are recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fourfold.anatomy import survey
from fourfold.randomness import Position, at, inside


def scoped(model: nn.Module, layers: str) -> nn.Module:
    """The model with every block and the whole inside their scopes, as placement does it."""
    container = model.get_submodule(layers)
    for path, module in (*((f"{layers}.{name}", child) for name, child in container.named_children()), ("", model)):
        module.forward = _inside(module, path, module.forward)
    return model


def _inside(module: nn.Module, path: str, forward):
    def call(*args, **kwargs):
        with inside(module, path):
            return forward(*args, **kwargs)

    return call


@pytest.fixture
def model(architecture) -> nn.Module:
    torch.manual_seed(0)
    return scoped(architecture.build().train(), architecture.layers)


def test_any_cut_of_the_rows(architecture, model: nn.Module):
    batch = architecture.batch(rows=3)

    def logits(first: int, count: int, step: int = 0):
        part = {key: value[first : first + count] for key, value in batch.items()}
        with torch.no_grad(), at(Position(5, step, first, count)):
            return architecture.logits(model, part)

    # Two steps warm nothing up: the stream is the position's alone.
    before = torch.get_rng_state()
    whole = logits(0, 3)
    if architecture.name != "opt":  # draws a number for its layer drop, from torch, even when that is off
        assert torch.equal(before, torch.get_rng_state())
    parts = torch.cat([logits(0, 1), logits(1, 2)])
    assert (parts - whole).abs().max() <= 1e-5 * whole.abs().max()
    assert (logits(0, 3, step=1) - whole).abs().max() > 1e-3 * whole.abs().max(), "another step, other masks"


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks(architecture, model: nn.Module, reentrant: bool):
    batch = architecture.batch()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with at(Position(5, 0, 0, 2)):
            architecture.loss(model, batch)[0].backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    for block in model.get_submodule(architecture.layers).children():
        block.forward = _recomputed(block.forward, reentrant)
    for expected, found in zip(plain, gradients(), strict=True):
        assert torch.equal(expected, found)


def _recomputed(forward, reentrant: bool):
    def call(*args, **kwargs):
        return checkpoint(lambda *a: forward(*a, **kwargs), *args, use_reentrant=reentrant, preserve_rng_state=False)

    return call


@pytest.mark.parametrize("padded", [False, True])
def test_no_stock_model_is_taken_to_rearrange_rows(architecture, padded: bool):
    """They look up positions, gather token types and put experts' results back; none of that disturbs a mask."""
    batch = dict(architecture.batch())
    if padded and architecture.name != "vit":
        batch["mask"] = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])

    def loss(model: nn.Module, batch):
        if "mask" not in batch:
            return architecture.loss(model, batch)
        return model(input_ids=batch["inputs"], attention_mask=batch["mask"]).logits.sum(), 1

    model = architecture.build().train()
    anatomy = survey(model, loss, batch)
    assert anatomy.dropouts and anatomy.layouts == {} and anatomy.inexact == ()
    if architecture.name == "mixtral":
        model.set_experts_implementation("grouped_mm")
        assert survey(model, loss, batch).inexact == ()
