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


class Mixer(nn.Module):
    """Of three streams of 8 features one, with the weights by which its result and the streams are added."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(3 * 8, 2 * 3 + 3 * 3)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before, after, mix = torch.sigmoid(self.weights(streams.flatten(2))).split((3, 3, 9), -1)
        return after, mix.unflatten(-1, (3, 3)), (before.unsqueeze(-1) * streams).sum(2)


class Mixed(nn.Module):
    """A block whose residual is three streams."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.norm, self.up, self.down = Mixer(), nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, streams: Tensor) -> Tensor:
        after, mix, x = self.mixer(streams)
        return after.unsqueeze(-1) * self.down(torch.relu(self.up(self.norm(x)))).unsqueeze(-2) + mix @ streams


def test_how_the_output_of_a_module_that_runs_whole_lies_is_settled_by_what_follows():
    """Here to cut the mixer's output helps at first and leads nowhere; only whole weights do."""

    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head, self.last = nn.Embedding(11, 8), nn.Linear(8, 11), Mixer()
            self.blocks = nn.ModuleList([Mixed(), Mixed()])

        def forward(self, tokens: Tensor) -> Tensor:
            streams = self.table(tokens).unsqueeze(2).expand(-1, -1, 3, -1)
            for block in self.blocks:
                streams = block(streams)
            return self.head(self.last(streams)[2])

    anatomy = survey(Streams(), total, {"x": torch.zeros(2, 5, dtype=torch.long)})
    assert anatomy.problems == ()
    mixers = {f"blocks.{block}.mixer.weights": Whole("x", None) for block in range(2)}
    assert anatomy.whole == {**mixers, "last": Whole("x", None)}
    roles = {name: (linear.contract, linear.output) for name, linear in anatomy.linears.items()}
    blocks = {f"blocks.{block}.up.weight": ("x", "y") for block in range(2)}
    blocks |= {f"blocks.{block}.down.weight": ("y", "x") for block in range(2)}
    assert roles == {**blocks, "head.weight": (None, "x")}
