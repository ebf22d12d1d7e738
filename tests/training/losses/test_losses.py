"""Losses against the definition, written out."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fourfold.training.losses import classification, cross_entropy, masked


class Bigram(nn.Module):
    """logits of the next token = a row of a table."""

    def __init__(self, vocabulary: int = 11, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocabulary, vocabulary, dtype=dtype))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


def test_next_token_sum_and_count():
    model, tokens = Bigram(), torch.randint(11, (3, 6))
    total, count = cross_entropy(model, {"tokens": tokens})
    rows = [(row[i], row[i + 1]) for row in tokens for i in range(5)]
    expected = sum(torch.logsumexp(model.table[a], 0) - model.table[a, b] for a, b in rows)
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    assert int(count) == 15


def test_ignored_targets_add_nothing_and_count_nothing():
    model, tokens, targets = Bigram(), torch.randint(11, (2, 4)), torch.randint(11, (2, 4))
    targets[0, 1] = targets[1, 3] = -100
    total, count = cross_entropy(model, {"tokens": tokens, "targets": targets})
    kept = targets != -100
    expected = sum(
        torch.logsumexp(model.table[a], 0) - model.table[a, b] for a, b in zip(tokens[kept], targets[kept], strict=True)
    )
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    assert int(count) == 6


def test_a_batch_of_only_ignored_targets_is_zero_over_zero():
    total, count = cross_entropy(
        Bigram(), {"tokens": torch.zeros(1, 3, dtype=torch.int64), "targets": torch.full((1, 3), -100)}
    )
    assert (total.item(), int(count)) == (0.0, 0)


def test_only_16_bit_logits_are_upcast():
    tokens = {"tokens": torch.randint(11, (1, 4))}
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        assert cross_entropy(Bigram(dtype=dtype), tokens)[0].dtype == expected


def test_parts_add_up_to_the_whole():
    model, tokens = Bigram(), torch.randint(11, (5, 9))
    whole, count = cross_entropy(model, {"tokens": tokens})
    parts = [cross_entropy(model, {"tokens": part}) for part in tokens.split([1, 3, 1])]
    torch.testing.assert_close(sum(total for total, _ in parts), whole, rtol=1e-13, atol=0)
    assert sum(int(part) for _, part in parts) == int(count)


def test_stock_models_give_their_own_loss_without_being_given_labels():
    tokens = torch.randint(50, (2, 9))
    llama = LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    models = (
        GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)),
        LlamaForCausalLM(llama),
    )
    for model in models:
        model.eval()
        total, count = cross_entropy(model, {"tokens": tokens})
        own = model(tokens, labels=tokens).loss
        assert int(count) == 16
        torch.testing.assert_close(total / count, own, rtol=1e-5, atol=0)


def test_masked_does_not_shift():
    model, tokens = Bigram(), torch.randint(11, (2, 4))
    targets = torch.full((2, 4), -100)
    targets[1, 0] = 7
    total, count = masked(model, {"tokens": tokens, "targets": targets})
    expected = torch.logsumexp(model.table[tokens[1, 0]], 0) - model.table[tokens[1, 0], 7]
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    assert int(count) == 1


def test_classification_counts_rows():
    inputs, targets = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 2, 1, -100])
    total, count = classification(nn.Identity(), {"inputs": inputs, "targets": targets})
    expected = sum(torch.logsumexp(inputs[i], 0) - inputs[i, targets[i]] for i in range(3))
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    assert int(count) == 3
