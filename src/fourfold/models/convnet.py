"""A small residual convnet with pre-activation blocks (He et al., 2016) and group norm, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The shape of a convnet.

    Attributes:
        classes: number of logits.
        channels: of the image.
        width: channels of the residual stream.
        blocks: number of residual blocks.
        groups: of the norms; they divide `width`.
    """

    classes: int = 10
    channels: int = 3
    width: int = 32
    blocks: int = 4
    groups: int = 4


class Block(nn.Module):
    """Two 3 × 3 convolutions on (batch, width, height, breadth), added to the input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(config.groups, config.width)
        self.conv1 = nn.Conv2d(config.width, config.width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(config.groups, config.width)
        self.conv2 = nn.Conv2d(config.width, config.width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, height, breadth) → same."""
        y = self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(F.relu(self.norm2(y)))


class ConvNet(nn.Module):
    """Images (batch, channels, height, breadth) → logits (batch, classes)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stem = nn.Conv2d(config.channels, config.width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.blocks)))
        self.norm = nn.GroupNorm(config.groups, config.width)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images of any size to logits."""
        x = self.blocks(self.stem(images))
        return self.head(F.relu(self.norm(x)).mean((2, 3)))
