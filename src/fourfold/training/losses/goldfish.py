"""The goldfish loss: a share of the next tokens is never learnt, so that no passage can be repeated word for word.

Hans et al., "Be like a Goldfish, Don't Memorize! Mitigating Memorization in Generative LLMs" (NeurIPS 2024, arXiv
2406.10209, section 3): cross-entropy over the tokens that a mask keeps. The mask drops one in k of them, and must drop
the same ones wherever a passage appears again, or the model puts it together from its copies. Hence `hashed`: a token
is dropped if a hash of the `context` tokens before it is below 1/k. `static` drops every k-th place of a row, which
protects against passages that always begin at the same place of a row, and is there to compare with.

The hash is a polynomial of the token ids over the integers modulo 2³¹ − 1, then mixed, so that contexts that differ by
little are decided apart; it needs no table and no seed, and is the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourfold.training.losses.cross_entropy import IGNORED, logits_of, shifted, summed

_PRIME = 2**31 - 1
"""Products of two numbers below it fit an int64, so that every device computes the same."""
_BASE, _MIX = 1_103_515_245, 0x45D9F3B


class GoldfishError(ValueError):
    """Options that cannot be: names the option, expected and found."""


@dataclass(frozen=True)
class Goldfish:
    """The loss, with its options.

    Attributes:
        k: one in k tokens is dropped.
        context: how many tokens before a token decide about it. Fewer protect sooner after the start of a passage; too
            few would drop the same word after the same short phrase everywhere (the paper takes 13).
        mask: hashed or static.
    """

    k: int = 4
    context: int = 13
    mask: str = "hashed"

    def __post_init__(self) -> None:
        for name, least in (("k", 2), ("context", 1)):
            if getattr(self, name) < least:
                raise GoldfishError(f"goldfish loss: expected {name} of at least {least}, found {getattr(self, name)}")
        if self.mask not in ("hashed", "static"):
            raise GoldfishError(f"goldfish loss: expected mask hashed or static, found {self.mask!r}")

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The sum of -log p(next token) over the tokens that are kept, and how many were.

        Args:
            model, batch: as for `cross_entropy`.
        """
        tokens, targets = shifted(batch)
        return summed(logits_of(model, tokens), targets.masked_fill(self.dropped(tokens), IGNORED))

    def dropped(self, tokens: Tensor) -> Tensor:
        """Which next tokens are never learnt, [rows, T] bool: a function of the tokens of the row, of nothing else.

        Args:
            tokens: [rows, T] int64. Place i decides about the token after it; places that do not yet have `context`
                tokens behind them are kept by `hashed`.
        """
        if self.mask == "static":
            places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
            return (places % self.k == 0).expand_as(tokens)
        dropped = torch.zeros_like(tokens, dtype=torch.bool)
        windows = tokens.shape[1] - self.context + 1
        if windows > 0:
            dropped[:, self.context - 1 :] = _hashes(tokens, self.context, windows) < _PRIME // self.k
        return dropped


def _hashes(tokens: Tensor, context: int, windows: int) -> Tensor:
    """Of every run of `context` tokens, [rows, windows], from 0 to 2³¹ − 2."""
    state = torch.zeros_like(tokens[:, :windows])
    for at in range(context):
        state = (state * _BASE + tokens[:, at : at + windows] + 1) % _PRIME
    for _ in range(2):
        state = (state ^ (state >> 16)) * _MIX % _PRIME
    return state ^ (state >> 16)
