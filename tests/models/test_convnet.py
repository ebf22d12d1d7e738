"""The convnet: shapes, count, and the residual path."""

from __future__ import annotations

import torch

from fourfold.models.convnet import Block, Config, ConvNet


def test_shapes_and_parameter_count():
    model = ConvNet(Config(classes=5, channels=3, width=8, blocks=2))
    assert model(torch.randn(2, 3, 6, 7)).shape == (2, 5)
    block = 2 * (9 * 8 * 8 + 2 * 8)
    assert sum(p.numel() for p in model.parameters()) == (27 * 8 + 8) + 2 * block + 16 + (8 * 5 + 5)


def test_a_block_with_a_zero_convolution_is_the_identity():
    block, x = Block(Config(width=8)), torch.randn(2, 8, 4, 4)
    torch.nn.init.zeros_(block.conv2.weight)
    assert torch.equal(block(x), x)
