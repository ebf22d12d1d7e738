"""Masked language modelling: targets stand where the tokens were hidden, nothing is shifted."""

from __future__ import annotations

from torch import Tensor, nn

from fourfold.training.losses.cross_entropy import logits_of, summed


def masked(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of -log p(hidden token), and how many were hidden.

    Args:
        model: maps tokens [rows, T] to logits [rows, T, vocabulary].
        batch: `tokens` [rows, T] and `targets` [rows, T] int64, -100 where nothing was hidden.
    """
    return summed(logits_of(model, batch["tokens"]), batch["targets"])
