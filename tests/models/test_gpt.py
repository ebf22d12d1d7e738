"""The GPT against a dense formula, and its shapes, ties and initial weights."""

from __future__ import annotations

import math

import pytest
import torch

from fourfold.models.gpt import GPT, Block, Config

SMALL = Config(vocabulary=17, context=8, layers=2, width=12, heads=3)


def test_shapes_and_parameter_count():
    config = Config(vocabulary=17, context=8, layers=2, width=12, heads=3, tied=False)
    model = GPT(config)
    h, v = 12, 17
    block = 4 * h * h + 4 * h + 8 * h * h + 5 * h + 4 * h
    assert sum(p.numel() for p in model.parameters()) == 2 * v * h + 8 * h + 2 * block + 2 * h
    assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, v)


def test_block_equals_the_formula():
    torch.manual_seed(0)
    block, x = Block(SMALL).double(), torch.randn(2, 5, 12, dtype=torch.float64)

    def norm(x, module):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        return (x - mean) / (var + 1e-5).sqrt() * module.weight + module.bias

    q, k, v = (norm(x, block.norm1) @ block.attention.qkv.weight.T + block.attention.qkv.bias).split(12, -1)
    heads = []
    for h in range(3):
        cut = slice(4 * h, 4 * h + 4)
        scores = q[..., cut] @ k[..., cut].transpose(1, 2) / 2.0
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
        heads.append(scores.softmax(-1) @ v[..., cut])
    y = x + torch.cat(heads, -1) @ block.attention.project.weight.T + block.attention.project.bias
    z = norm(y, block.norm2) @ block.mlp.expand.weight.T + block.mlp.expand.bias
    z = 0.5 * z * (1 + torch.tanh((2 / math.pi) ** 0.5 * (z + 0.044715 * z**3)))
    expected = y + z @ block.mlp.contract.weight.T + block.mlp.contract.bias
    assert torch.allclose(block(x), expected, rtol=0, atol=1e-13)


def test_it_is_causal():
    model = GPT(SMALL).eval()
    tokens = torch.randint(0, 17, (1, 8))
    other = tokens.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 17
    assert torch.equal(model(tokens)[:, :5], model(other)[:, :5])
    assert not torch.equal(model(tokens)[:, 5:], model(other)[:, 5:])


def test_initial_weights():
    model = GPT(Config(vocabulary=400, context=64, layers=2, width=128, heads=4))
    block = model.blocks[0]
    assert isinstance(block, Block)
    for weight, std in (
        (model.tokens.weight, 0.02),
        (block.mlp.expand.weight, 0.02),
        (block.mlp.contract.weight, 0.01),
    ):
        # standard error of a standard deviation: std / sqrt(2 n)
        assert abs(weight.std().item() - std) < 6 * std / (2 * weight.numel()) ** 0.5
    assert block.mlp.expand.bias.abs().max() == 0 and (block.norm1.weight == 1).all()


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_tied_when_asked(tied: bool):
    model = GPT(Config(vocabulary=17, context=8, layers=1, width=12, heads=3, tied=tied))
    assert (model.head.weight is model.tokens.weight) == tied


def test_without_bias():
    names = [name for name, _ in GPT(Config(vocabulary=17, layers=1, width=12, heads=3, bias=False)).named_parameters()]
    assert not [name for name in names if name.endswith("bias")]


def test_dropout_is_on_in_training_only():
    model = GPT(Config(vocabulary=17, context=8, layers=1, width=12, heads=3, dropout=0.5))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="width 10 is not divisible by heads 3"):
        Config(vocabulary=5, width=10, heads=3)
    with pytest.raises(ValueError, match="9 tokens is longer than the context of 8"):
        GPT(SMALL)(torch.zeros(1, 9, dtype=torch.long))
