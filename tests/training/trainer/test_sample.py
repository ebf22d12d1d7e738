"""Sampling by counter-based draws."""

import pytest
import torch
from torch import nn

from fourfold.training.data import tokenizer
from fourfold.training.sample import choose, extend, write


class Successor(nn.Module):
    """The next token is surely the last one plus 1; remembers how long the sequences were."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(50.0))
        self.vocabulary, self.lengths = vocabulary, []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.lengths.append(tokens.shape[1])
        return nn.functional.one_hot((tokens + 1) % self.vocabulary, self.vocabulary) * self.scale


def test_greedy_follows_the_likeliest_and_the_window_is_kept():
    model = Successor(10)
    assert extend(model, [3], tokens=9, context=4, temperature=0, seed=0) == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert model.lengths == [1, 2, 3, 4, 4, 4, 4, 4, 4]


def test_a_draw_picks_by_inverse_cdf():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    draws = [0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.5999, 0.6001, 1 - 2**-53]
    assert [choose(logits, 1.0, draw) for draw in draws] == [0, 0, 1, 1, 2, 2, 3, 3]
    squared = [choose(logits, 0.5, draw) for draw in (0.0, 0.034, 0.167, 0.467)]  # p squared: 1, 4, 9, 16 of 30
    assert squared == [0, 1, 2, 3]
    assert choose(logits, 0, 0.0) == 3


def test_the_same_seed_writes_the_same_text():
    torch.manual_seed(0)
    words = tokenizer.train(["the quick brown fox " * 20], 300)
    table = nn.Embedding(300, 300)
    texts = [write(table, words, "the", tokens=12, context=8, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("the")


def test_a_prompt_without_a_token_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        extend(Successor(4), [], tokens=1, context=4, temperature=0, seed=0)
