"""Roles of layers on a tensor grid, of small models written for the case."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fourfold.anatomy import Anatomy, Dropout, Norm, Whole, survey
from fourfold.models import convnet, gpt


def total(model: nn.Module, batch) -> tuple[Tensor, int]:
    return model(batch["x"]).sum(), 1


def survey_gpt(**settings) -> Anatomy:
    config = gpt.Config(vocabulary=17, context=8, layers=1, width=12, heads=3, dropout=0.1, **settings)
    return survey(gpt.GPT(config), total, {"x": torch.zeros(2, 8, dtype=torch.long)})


def test_gpt():
    anatomy = survey_gpt(tied=False)
    roles = {name: (linear.contract, linear.output) for name, linear in anatomy.linears.items()}
    assert roles == {
        "blocks.0.attention.qkv.weight": ("x", "y"),
        "blocks.0.attention.project.weight": ("y", "x"),
        "blocks.0.mlp.expand.weight": ("x", "y"),
        "blocks.0.mlp.contract.weight": ("y", "x"),
        "head.weight": ("x", "y"),
    }
    assert anatomy.norms == dict.fromkeys(("blocks.0.norm1", "blocks.0.norm2", "norm"), Norm("x", True))
    assert anatomy.embeddings == {"tokens.weight": "x", "positions.weight": "x"}
    assert (anatomy.siblings, anatomy.raw, anatomy.problems) == ((), {}, ())
    assert anatomy.dropouts == (
        Dropout("drop", "x", "dropout", "#0"),
        Dropout("blocks.0.attention", "y", "attention", "#1"),
        Dropout("blocks.0.drop", "x", "dropout", "#2"),
        Dropout("blocks.0.drop", "x", "dropout", "#3"),
    )


def test_a_tied_weight_is_table_and_head():
    anatomy = survey_gpt(tied=True)
    assert anatomy.embeddings["tokens.weight"] == "x"
    assert anatomy.linears["tokens.weight"].module == "head"


def test_convnet():
    anatomy = survey(convnet.ConvNet(convnet.Config(blocks=2)), total, {"x": torch.zeros(2, 3, 8, 8)})
    assert [linear.role for linear in anatomy.linears.values()] == ["entry", *("normal", "transposed") * 2, "normal"]
    assert anatomy.dropouts == ()


def test_a_residual_that_would_join_x_and_y_runs_whole():
    class Skewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(5, 4), nn.Linear(4, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.table(tokens)
            return x + self.linear(x)

    anatomy = survey(Skewed(), total, {"x": torch.zeros(2, 3, dtype=torch.long)})
    assert anatomy.whole == {"linear": Whole("x", "x")}
    assert (anatomy.linears, anatomy.problems) == ({}, ())


def test_a_weight_contracted_over_both_axes_runs_whole():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(5, 4), nn.Linear(4, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.linear(self.linear(self.table(tokens)))

    anatomy = survey(Twice(), total, {"x": torch.zeros(2, 3, dtype=torch.long)})
    assert anatomy.whole == {"linear": Whole("x", "x")}
    assert (anatomy.linears, anatomy.problems) == ({}, ())
