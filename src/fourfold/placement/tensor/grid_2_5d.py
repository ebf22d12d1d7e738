"""Tesseract's 2.5D algorithm (Wang et al., "2.5-dimensional Distributed Model Training", arXiv 2105.14500).

It is the 2D algorithm on d layers, each with a copy of the weights and its own rows of the batch. The sum of weight
gradients over the layers is the one over replicas: once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.plan.grid import Grid


@dataclass(frozen=True)
class Options:
    """Sizes of the axes.

    Attributes:
        q: every layer is a grid of q x q ranks.
        d: layers.
    """

    q: int = 1
    d: int = 1


def grid(options: Options) -> Grid:
    """The grid that the options describe."""
    return Grid(y=options.q, z=options.q, copies=options.d, between="plane")
