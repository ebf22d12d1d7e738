"""Megatron's 1D algorithm with sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2).

Between linears, rows of activations lie over y: sums become a scatter and a gather, and norms and dropouts are no
longer computed by every rank for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.plan.grid import Grid


@dataclass(frozen=True)
class Options:
    """Sizes of the axes.

    Attributes:
        y: ranks over which heads, inner features and vocabulary lie, and between them the rows of activations.
        keep: the linears' gathered inputs stay until backward, which else gathers them again.
    """

    y: int = 1
    keep: bool = False


def grid(options: Options) -> Grid:
    """The grid that the options describe."""
    return Grid(y=options.y, between="sequence_kept" if options.keep else "sequence")
