"""The norm of the whole gradient over any placement: every logical element counts once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum, inf, sqrt

import torch
from torch import Tensor


def partial(gradients: Iterable[Tensor], order: float) -> float:
    """This rank's share: the sum of squares (order 2) or the largest magnitude (order inf) of its boxes.

    Args:
        gradients: one tensor a weight. Which weights travel together must not matter, so sums over weights are exact
            (`fsum`). Padding is zero and adds nothing.
        order: 2 or inf.
    """
    if order == inf:
        return max((float(gradient.abs().amax()) for gradient in gradients if gradient.numel()), default=0.0)
    return fsum(float(torch.linalg.vector_norm(gradient)) ** 2 for gradient in gradients if gradient.numel())


def total(partials: Sequence[float], order: float) -> float:
    """The norm from the shares of all disjoint shards."""
    return max(partials, default=0.0) if order == inf else sqrt(fsum(partials))


def coefficient(norm: float, limit: float | None) -> float:
    """The factor that brings a gradient of this norm to at most `limit`, as torch's `clip_grad_norm_` has it."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
