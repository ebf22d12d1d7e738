"""The 3D algorithm (Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural Networks", 2021).

It is the 4D grid with x = y = z = q whose activations are cut by rows as well over the axis on which the 4D algorithm
keeps copies of them: gathered before a product, scattered after it (Agarwal et al. 1995).
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.plan.grid import Grid


@dataclass(frozen=True)
class Options:
    """Sizes of the axes.

    Attributes:
        q: the grid has q x q x q ranks.
    """

    q: int = 1


def grid(options: Options) -> Grid:
    """The grid that the options describe."""
    return Grid(options.q, options.q, options.q, between="cube")
