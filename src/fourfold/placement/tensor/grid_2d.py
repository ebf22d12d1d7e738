"""Optimus' 2D algorithm (Xu et al., "An Efficient 2D Method for Training Super-Large Deep Learning Models", 2021).

Weights and activations lie on a q x q grid: batch rows (and the input features of weights) over z, features over y.
Products are SUMMA's: q steps, each a broadcast of a panel of either operand (van de Geijn and Watts 1997).
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.plan.grid import Grid


@dataclass(frozen=True)
class Options:
    """Sizes of the axes.

    Attributes:
        q: the grid has q x q ranks.
    """

    q: int = 1


def grid(options: Options) -> Grid:
    """The grid that the options describe."""
    return Grid(y=options.q, z=options.q, between="plane")
