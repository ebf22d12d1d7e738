"""Text that a model writes. The draws come from a counter-based stream: every rank writes the same."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from fourfold.randomness import uniform
from fourfold.training.losses.cross_entropy import logits_of


def write(
    model: nn.Module, tokenizer: Tokenizer, prompt: str, *, tokens: int, context: int, temperature: float, seed: int
) -> str:
    """The prompt and `tokens` more tokens, as text.

    Args:
        model: in evaluation mode, all its weights at hand.
        tokenizer: of the text that it was trained on.
        prompt: how the text begins.
        tokens: how many to add.
        context: the longest sequence that the model takes; older tokens fall out of its sight.
        temperature: 0: always the likeliest token.
        seed: of the draws.
    """
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    return tokenizer.decode(extend(model, ids, tokens=tokens, context=context, temperature=temperature, seed=seed))


@torch.no_grad()
def extend(model: nn.Module, ids: list[int], *, tokens: int, context: int, temperature: float, seed: int) -> list[int]:
    """`ids` and `tokens` more. `ids` must hold at least one token: a model continues, it does not begin."""
    if not ids:
        raise ValueError("sample.prompt: expected a prompt of at least one token, found none; write a word")
    device = next(model.parameters()).device
    written = list(ids)
    for position in range(tokens):
        window = torch.tensor([written[-context:]], device=device)
        logits = logits_of(model, window)[0, -1].double().cpu()
        draw = float(uniform(seed, "sample", position, 1, torch.float64))
        written.append(choose(logits, temperature, draw))
    return written


def choose(logits: Tensor, temperature: float, draw: float) -> int:
    """One token: the likeliest at temperature 0, else by inverse CDF at `draw` in [0, 1).

    Args:
        logits: [vocabulary], float64.
        temperature: divides the logits.
        draw: a uniform number.
    """
    if temperature == 0:
        return int(logits.argmax())
    reached = torch.softmax(logits / temperature, 0).cumsum(0)
    index = int(torch.searchsorted(reached, torch.tensor(draw * float(reached[-1]), dtype=reached.dtype), right=True))
    return min(index, len(logits) - 1)
