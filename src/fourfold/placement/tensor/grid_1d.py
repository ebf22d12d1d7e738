"""Megatron's 1D algorithm (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3): column linears, then row ones.

It is the 4D grid with x = 1: two sums of activations a layer in forward, two in backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.plan.grid import Grid, patterns


@dataclass(frozen=True)
class Options:
    """Sizes of the axes.

    Attributes:
        y: ranks over which heads, inner features and vocabulary lie.
        by_rows: modules that run whole and are computed by batch rows: paths, in which `*` stands for anything.
    """

    y: int = 1
    by_rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_rows", patterns(self.by_rows))


def grid(options: Options) -> Grid:
    """The grid that the options describe."""
    return Grid(y=options.y, by_rows=options.by_rows)
