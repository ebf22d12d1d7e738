"""How the products of cut linears run; what they compute does not hang on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold.placement.tensor.kernels import Kernels


@dataclass(frozen=True)
class Tuning:
    """Settings of every product of a model. See `product`.

    Attributes:
        overlap: sums of input gradients travel while weight gradients are computed.
        chunks: pieces of rows that travel while others are multiplied.
        kernels: chooses how matrices are multiplied; None: as they lie.
    """

    overlap: bool = True
    chunks: int = 1
    kernels: Kernels | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """As `product` takes them."""
        return {"overlap": self.overlap, "chunks": self.chunks, "kernels": self.kernels}
