"""Cross-entropy of classes: one target a row."""

from __future__ import annotations

from torch import Tensor, nn

from fourfold.training.losses.cross_entropy import summed


def classification(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of -log p(class) over the rows, and how many rows counted.

    Args:
        model: maps `batch["inputs"]` [rows, ...] to logits [rows, classes] (a tensor, or an object with `.logits`).
        batch: `inputs`, and `targets` [rows] int64.
    """
    output = model(batch["inputs"])
    return summed(output if isinstance(output, Tensor) else output.logits, batch["targets"])
