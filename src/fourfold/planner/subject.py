"""What is to be trained, as far as a forecast needs to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Subject:
    """A model, its loss and its batch. Nothing is allocated before somebody asks for a forecast.

    Attributes:
        build: makes the model. It is called under the meta device, in a subprocess: it must not read big files, and
            need not draw real weights.
        loss: `loss(model, batch) -> (sum, count)`, as everywhere in fourfold.
        batch: example tensors whose dim 0 is the row; two rows are enough (meta tensors will do). Only shapes and
            dtypes matter: every other dim is taken as it is, and the rows are taken from a plan's share of `rows`.
        rows: rows of the global batch, that is of one optimizer step.
        optimizer: "adamw" or "sgd" (with momentum: "sgd-momentum").
        tokens_per_row: what one row counts for in a rate; a language model's sequence length.
        name: how reports call it.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Any]]
    batch: Mapping[str, Tensor]
    rows: int
    optimizer: str = "adamw"
    tokens_per_row: int = 1
    name: str = "model"

    def __post_init__(self) -> None:
        if not self.batch:
            raise ValueError("subject.batch: expected at least one example tensor, found none")
        for name, tensor in self.batch.items():
            if tensor.dim() == 0 or tensor.shape[0] < 1:
                raise ValueError(
                    f"subject.batch[{name!r}]: dim 0 is the row; "
                    f"expected at least one, found shape {tuple(tensor.shape)}"
                )
        if self.rows < 1:
            raise ValueError(f"subject.rows: expected at least 1 row a step, found {self.rows}")
        if self.optimizer not in OPTIMIZER_STATES:
            raise ValueError(
                f"subject.optimizer: expected one of {', '.join(OPTIMIZER_STATES)}, found {self.optimizer!r}"
            )


OPTIMIZER_STATES = {"adamw": 2, "sgd": 0, "sgd-momentum": 1}
"""Tensors of a weight's size that each optimizer keeps."""
