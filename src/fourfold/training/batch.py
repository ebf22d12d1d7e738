"""A step's global batch, asked for by logical rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Batch(Protocol):
    """The rows of one optimizer step. A rank asks only for the rows that it computes."""

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        ...

    def __call__(self, rows: range) -> dict[str, Tensor]:
        """These rows: dim 0 of every tensor."""
        ...


class BatchError(ValueError):
    """A batch that cannot be cut by rows."""


@dataclass(frozen=True)
class Held:
    """A batch whose tensors are all at hand."""

    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        sizes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        if not sizes or any(not shape for shape in sizes.values()) or len({shape[0] for shape in sizes.values()}) != 1:
            raise BatchError(
                f"batch: expected tensors with the same number of rows in dim 0, found {sizes or 'no tensor at all'}"
            )
        if self.rows == 0:
            raise BatchError("batch: expected at least one row, found none")

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return next(iter(self.tensors.values())).shape[0]

    def __call__(self, rows: range) -> dict[str, Tensor]:
        """These rows, as views."""
        return {name: tensor[rows.start : rows.stop] for name, tensor in self.tensors.items()}


def batch_of(batch: Batch | Mapping[str, Tensor]) -> Batch:
    """A batch as it is, or a mapping of tensors as one."""
    return Held(batch) if isinstance(batch, Mapping) else batch
