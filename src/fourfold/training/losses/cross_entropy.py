"""Cross-entropy of the next token, for fourfold's GPT and for causal language models of transformers."""

from __future__ import annotations

import inspect
from functools import lru_cache

from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""A target of this value is not counted."""


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of -log p(next token) over the batch, and over how many tokens.

    Args:
        model: maps tokens [rows, T] to logits [rows, T, vocabulary]; a model of transformers is called without labels
            and without a cache, so that the shift and the division stay here.
        batch: `tokens` [rows, T + 1] int64; or `tokens` [rows, T] with `targets` [rows, T], where IGNORED is not
            counted.

    Returns:
        (sum, count), both scalars. The step divides once, by the global count.
    """
    tokens, targets = shifted(batch)
    return summed(logits_of(model, tokens), targets)


def shifted(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the model reads and what comes next, both [rows, T], of a batch with or without `targets`."""
    tokens, targets = batch["tokens"], batch.get("targets")
    return (tokens[:, :-1], tokens[:, 1:]) if targets is None else (tokens, targets)


def summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the targets that count, and how many do.

    Args:
        logits: [..., classes]; 16-bit ones are taken to float32 first, others are left as they are.
        targets: [...] int64.
    """
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits of a model, whichever of the two forms its `forward` has."""
    output = model(tokens, use_cache=False) if _caches(type(model)) else model(tokens)
    return output if isinstance(output, Tensor) else output.logits


@lru_cache(maxsize=64)
def _caches(kind: type[nn.Module]) -> bool:
    """The model's forward takes `use_cache`, as causal models of transformers do."""
    return "use_cache" in inspect.signature(kind.forward).parameters
