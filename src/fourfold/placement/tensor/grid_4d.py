"""AxoNN's 4D algorithm (Singh et al., "A 4D Hybrid Algorithm to Scale Parallel Training to Thousands of GPUs", 2023).

Weights are cut over x and y by features and over z by rows, activations over z by rows and over x or y by features. A
normal linear sums its output over x and its input gradient over y, a transposed one the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.plan.grid import Grid, patterns


@dataclass(frozen=True)
class Options:
    """Sizes of the axes; `data` is the plan's.

    Attributes:
        x: ranks over which the residual's features lie.
        y: ranks over which heads, inner features and vocabulary lie.
        z: ranks over which batch rows and stored weights lie.
        by_rows: modules that run whole and are computed by batch rows: paths, in which `*` stands for anything.
    """

    x: int = 1
    y: int = 1
    z: int = 1
    by_rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_rows", patterns(self.by_rows))


def grid(options: Options) -> Grid:
    """The grid that the options describe."""
    return Grid(options.x, options.y, options.z, by_rows=options.by_rows)
