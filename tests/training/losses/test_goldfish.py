"""The goldfish loss: by hand, one in k dropped, the same wherever a context comes again, on any ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.config import Config
from fourfold.placement.tensor.logits import SplitLogits
from fourfold.training import subject
from fourfold.training.losses import Goldfish, cross_entropy
from fourfold.training.losses.goldfish import GoldfishError

VOCABULARY = 50


def tokens_of(rows: int, length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


class Bigram(nn.Module):
    """logits of the next token = a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        self.table = nn.Parameter(draw)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


@pytest.mark.parametrize("loss", [Goldfish(), Goldfish(k=2, context=3), Goldfish(k=3, mask="static")])
def test_the_loss_by_hand(loss: Goldfish):
    """L = −1/|G| Σ G log p, the sum and |G| apart (Hans et al., equation 1)."""
    model, tokens = Bigram(), tokens_of(4, 60)
    total, count = loss(model, {"tokens": tokens})
    dropped = loss.dropped(tokens[:, :-1])
    expected, kept = torch.zeros((), dtype=torch.float64), 0
    for row in range(4):
        for i in range(59):
            if not dropped[row, i]:
                logits = model.table[tokens[row, i]]
                expected = expected - (logits[tokens[row, i + 1]].exp() / logits.exp().sum()).log()
                kept += 1
    assert 0 < kept < 4 * 59 and int(count) == kept
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)


def test_static_drops_every_kth_place():
    dropped = Goldfish(k=3, mask="static").dropped(tokens_of(2, 8))
    assert dropped.tolist() == [[False, False, True] * 2 + [False, False]] * 2


def reference(context: list[int], k: int) -> bool:
    """The hash as its module says it, on Python's integers."""
    prime, state = 2**31 - 1, 0
    for token in context:
        state = (state * 1_103_515_245 + token + 1) % prime
    for _ in range(2):
        state = (state ^ state >> 16) * 0x45D9F3B % prime
    return (state ^ state >> 16) < prime // k


@pytest.mark.parametrize("k, context", [(2, 1), (4, 13), (7, 5)])
def test_a_token_is_dropped_by_the_tokens_before_it_alone(k: int, context: int):
    loss, tokens = Goldfish(k=k, context=context), tokens_of(3, 40, vocabulary=2**17)
    dropped = loss.dropped(tokens)
    assert not dropped[:, : context - 1].any(), "before there is a whole context, nothing is dropped"
    for row in range(3):
        for i in range(context - 1, 40):
            assert bool(dropped[row, i]) == reference(tokens[row, i - context + 1 : i + 1].tolist(), k)


def test_a_passage_loses_the_same_tokens_wherever_it_comes_again():
    passage, loss = tokens_of(1, 60)[0], Goldfish()
    alone = loss.dropped(passage[None])[0, 12:]
    assert alone.any() and not alone.all()
    for seed, at in enumerate((0, 1, 17, 40)):
        row = tokens_of(1, 100, seed + 1)
        row[0, at : at + 60] = passage
        assert torch.equal(loss.dropped(row)[0, at + 12 : at + 60], alone)


@pytest.mark.parametrize("k", [2, 3, 4, 8, 128])
@pytest.mark.parametrize("context", [1, 4, 13])
def test_one_in_k_is_dropped(k: int, context: int):
    """Of 200,000 different contexts: within six standard errors of 1/k."""
    vocabulary = 2**20 if context == 1 else 1000
    dropped = Goldfish(k=k, context=context).dropped(tokens_of(1, 200_000 + context, vocabulary=vocabulary))
    share = dropped[:, context - 1 :].double().mean().item()
    assert abs(share - 1 / k) < 6 * (1 / k * (1 - 1 / k) / 200_000) ** 0.5


def test_contexts_that_are_nearly_alike_are_decided_apart():
    """Contexts that differ in one token by one: how often neighbours agree is p² + (1 − p)², as if thrown."""
    n, k = 50_000, 4
    for place in (0, 6, 12):
        contexts = torch.full((n, 13), 7)
        contexts[:, place] = torch.arange(n)
        dropped = Goldfish(k=k).dropped(contexts)[:, -1].double()
        assert abs(dropped.mean().item() - 1 / k) < 6 * (3 / 16 / n) ** 0.5
        agree = (dropped[1:] == dropped[:-1]).double().mean().item()
        assert abs(agree - 10 / 16) < 6 * (10 / 16 * 6 / 16 / n) ** 0.5


def test_other_ignored_targets_stay_ignored():
    model, tokens, loss = Bigram(), tokens_of(2, 30), Goldfish(k=2, context=2)
    targets = tokens_of(2, 30, 5)
    targets[:, ::3] = -100
    _, count = loss(model, {"tokens": tokens, "targets": targets})
    assert int(count) == int(((targets != -100) & ~loss.dropped(tokens)).sum())


@pytest.mark.parametrize("mask", ["hashed", "static"])
def test_rows_in_parts_add_up_to_the_whole(mask: str):
    model, tokens, loss = Bigram(), tokens_of(5, 40), Goldfish(k=3, context=4, mask=mask)
    whole, count = loss(model, {"tokens": tokens})
    parts = [loss(model, {"tokens": part}) for part in tokens.split([1, 3, 1])]
    torch.testing.assert_close(sum(total for total, _ in parts), whole, rtol=1e-13, atol=0)
    assert sum(int(part) for _, part in parts) == int(count)


def test_rows_shorter_than_the_context_are_plain_cross_entropy():
    model, batch = Bigram(), {"tokens": tokens_of(3, 13)}
    ours, plain = Goldfish()(model, batch), cross_entropy(model, batch)
    assert torch.equal(ours[0], plain[0]) and int(ours[1]) == int(plain[1])


def test_on_split_logits():
    """Three ranks with a part of the vocabulary each: one process's sum, count and gradient."""
    sizes, loss, batch = [20, 13, 17], Goldfish(k=2, context=3), {"tokens": tokens_of(2, 30)}
    model = Bigram()
    total, count = loss(model, batch)
    total.backward()

    def rank(axis: wire.Axis) -> tuple[Tensor, Tensor, Tensor | None]:
        table = model.table.detach().split(sizes, 1)[axis.index].clone().requires_grad_()
        mode = SplitLogits()

        class Part(nn.Module):
            def forward(self, tokens: Tensor) -> Tensor:
                with mode.paused():
                    logits = table[tokens]
                mode.mark(logits, axis, sizes)
                return logits

        with mode:
            mine, kept = loss(Part(), batch)
        mine.backward()
        return mine.detach(), kept, table.grad

    ranks = wire.threads.launch(3, lambda world: rank(wire.Mesh(world, {"y": 3})["y"]), timeout=60)
    for found, kept, _ in ranks:
        torch.testing.assert_close(found, total.detach(), rtol=1e-12, atol=0)
        assert int(kept) == int(count)
    gradient = torch.cat([part for *_, part in ranks if part is not None], 1)
    assert model.table.grad is not None
    assert (gradient - model.table.grad).abs().max() <= 1e-12 * model.table.grad.abs().max()


@pytest.mark.parametrize(
    "options, match",
    [
        ({"k": 1}, "expected k of at least 2, found 1"),
        ({"context": 0}, "expected context of at least 1, found 0"),
        ({"mask": "random"}, "expected mask hashed or static, found 'random'"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict, match: str):
    with pytest.raises(GoldfishError, match=match):
        Goldfish(**options)


def test_a_config_gives_its_options():
    settings = {"loss": {"name": "goldfish", "k": 3, "context": 5, "mask": "static"}}
    assert subject.loss(Config.model_validate(settings)) == Goldfish(3, 5, "static")
    assert subject.loss(Config.model_validate({"loss": {"name": "goldfish"}})) == Goldfish()
    assert subject.loss(Config()) is cross_entropy
