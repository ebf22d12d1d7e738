"""Sequence parallelism that keeps what it gathers for the weights' gradients: fewer bytes, and more memory."""

from __future__ import annotations

from fourfold.placement.tensor import sequence


class Way(sequence.Way):
    """Time lies over y between a block's linears, and all of it is kept where it was gathered."""

    kept = True
