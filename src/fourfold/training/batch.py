"""A step's global batch, asked for by logical rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

NAMES = "name each tensor as the loss reads it"


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
        if not self.tensors:
            raise BatchError(f"batch: expected a tensor at least, found an empty mapping; {NAMES}")
        for name, value in self.tensors.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                raise BatchError(f"batch[{name!r}]: {_no_rows(value)}")
        if len({value.shape[0] for value in self.tensors.values()}) != 1:
            found = ", ".join(f"{name} {value.shape[0]}" for name, value in self.tensors.items())
            raise BatchError(
                f"batch: expected as many rows (entries of dim 0) in every tensor, found {found}; "
                "cut or pad them to one number"
            )
        if self.rows == 0:
            raise BatchError("batch: expected at least one row, found none; leave the step out")

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return next(iter(self.tensors.values())).shape[0]

    def __call__(self, rows: range) -> dict[str, Tensor]:
        """These rows, as views."""
        return {name: tensor[rows.start : rows.stop] for name, tensor in self.tensors.items()}


def batch_of(batch: Batch | Mapping[str, Tensor]) -> Batch:
    """A batch as it is, or a mapping of tensors as one.

    Raises:
        BatchError: it is neither, or no batch that can be cut by rows: says which key, expected, found, what to try.
    """
    if isinstance(batch, Mapping):
        return Held(batch)
    if callable(batch) and hasattr(batch, "rows"):
        return batch
    raise BatchError(
        "batch: expected a mapping of names to tensors, or something with `rows` that gives rows when called, "
        f"found {type(batch).__name__}; {NAMES}: {{'tokens': …}}"
    )


def _no_rows(value: object) -> str:
    """What is said of a value that has no rows."""
    if isinstance(value, Tensor):
        found, array = "a tensor without dims", False
    else:
        found, array = type(value).__name__, isinstance(value, (list, tuple)) or hasattr(value, "__array__")
    remedy = "make it one with torch.as_tensor" if array else "what is no row belongs into the loss, not into the batch"
    return f"expected a tensor with a row of the batch for each entry of dim 0, found {found}; {remedy}"
