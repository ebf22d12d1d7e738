"""The part of a logical tensor that one rank hands in to be saved, or to be filled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fourfold.training.checkpoint.errors import CheckpointError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""The dtypes that a checkpoint holds, by the names that its manifest uses."""


@dataclass(frozen=True)
class Box:
    """One box of a logical tensor.

    A rank may hold several boxes of one name (packed q|k|v cut by rows is three), and empty ones.

    Attributes:
        name: logical name, as one process would see it.
        shape: logical shape of the whole tensor; `()` for a scalar.
        offsets: where the box begins, per dim of `shape`.
        tensor: the values, with the box's sizes; saving reads it, loading fills it in place (it may be a view).
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        object.__setattr__(self, "offsets", tuple(map(int, self.offsets)))
        where = f"box of {self.name!r}"
        if not len(self.shape) == len(self.offsets) == self.tensor.dim():
            raise CheckpointError(
                f"{where}: expected as many offsets and sizes as the logical shape {self.shape} has dims, "
                f"found offsets {self.offsets} and a tensor of sizes {self.sizes}"
            )
        for extent, offset, size in zip(self.shape, self.offsets, self.sizes, strict=True):
            if offset < 0 or offset + size > extent:
                raise CheckpointError(
                    f"{where}: expected it inside the logical shape {self.shape}, "
                    f"found {span(self.offsets, self.sizes)}"
                )
        if self.dtype not in DTYPES:
            raise CheckpointError(f"{where}: expected one of the dtypes {', '.join(DTYPES)}, found {self.dtype}")

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Box:
        """The box that is all of the logical tensor."""
        return cls(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Extent of the box, per dim."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        """Name of the dtype, as the manifest writes it."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.tensor.numel() * self.tensor.element_size()


def span(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """A box as one would index it: `[0:4, 8:12]`."""
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(offsets, sizes, strict=True)) + "]"
