"""What a loss returns, looked at before anything is done with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Tensor | int]]
"""`loss(model, batch) -> (sum, count)`: calls the model itself, sums over tokens or rows, says how many there were."""

CONTRACT = "loss(model, batch) -> (sum, count)"


class LossError(ValueError):
    """A loss that returns what cannot be trained on: says expected, found, and what to try."""


def looked_at(loss: Loss) -> Loss:
    """The same loss; what it returns is refused in words where torch's own would come later, and from elsewhere.

    Raises:
        LossError: (the loss, when called) its result is not a pair of a scalar tensor that leads back to a trained
            weight, and a number.
    """

    @wraps(loss)
    def asked(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | int]:
        result: Any = loss(model, batch)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise LossError(
                f"{CONTRACT}: expected a pair, found {_told(result)}; return the sum over what counts, not the mean, "
                "and how many counted, as the losses in fourfold.training.losses do"
            )
        total, count = result
        _check_sum(model, total)
        if isinstance(count, Tensor) and count.numel() != 1 or not hasattr(count, "__float__"):
            raise LossError(f"{CONTRACT}: expected one number for the count, found {_told(count)}; sum it up")
        return total, count

    return asked


def _check_sum(model: nn.Module, total: object) -> None:
    if not isinstance(total, Tensor):
        raise LossError(
            f"{CONTRACT}: expected a tensor for the sum, found {_told(total)}; return what the loss function gave, "
            "without float() or .item()"
        )
    if total.numel() != 1 or not total.is_floating_point():
        raise LossError(
            f"{CONTRACT}: expected a floating-point scalar for the sum, found {_told(total)}; add up with .sum(), or "
            'reduction="sum"'
        )
    if not total.requires_grad and torch.is_grad_enabled():
        if not any(weight.requires_grad for weight in model.parameters()):
            raise LossError(
                f"{type(model).__name__}: expected a weight to train, found all of them frozen (requires_grad=False); "
                "unfreeze one before parallelize, or call run.evaluate"
            )
        raise LossError(
            f"{CONTRACT}: expected a sum that leads back to the model's weights, found one without a gradient; is it "
            "computed under torch.no_grad(), or from .detach(), .item() or argmax?"
        )


def _told(value: object) -> str:
    """A value's type, and of a tensor its element type and shape."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
