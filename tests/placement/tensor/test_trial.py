"""What only numbers show is refused before anything is allocated: each test breaks one thing on purpose."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold import wire
from fourfold.models.gpt import GPT, Config
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor import split as splitting
from fourfold.placement.tensor import summa, trial
from fourfold.placement.tensor.tables import TableExecutor
from fourfold.plan import Plan
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize

from .grouped import Sizes, decoding

TOKENS = {"tokens": torch.randint(40, (4, 9), generator=torch.Generator().manual_seed(3))}


def placed(model: nn.Module, loss: Any, batch: Mapping[str, Tensor], **tensor: Any) -> list[tuple[str, str]]:
    """What every rank refuses, or why it did not try."""
    plan = {"placement": {"tensor": {"algorithm": "4d", **tensor}}}

    def body(world: wire.World) -> tuple[str, str]:
        own = copy.deepcopy(model)
        try:
            run = parallelize(own, loss, OptimizerOptions(), plan, world=world, example=batch)
        except PlacementError as error:
            return str(error), ""
        assert run.placed.split is not None
        return "", run.placed.split.untried

    return wire.threads.launch(Plan.of(plan).world, body)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(Config(vocabulary=40, context=8, layers=2, width=24, heads=4))


def test_a_gradient_that_nobody_sums_is_refused_by_every_rank_in_the_same_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(splitting, "_summing", lambda axis: lambda gradient: gradient)
    work = decoding(Sizes(heads=4, shared=2))
    found = placed(work.fresh(), work.loss, work.batch(0), y=4)
    assert len(set(found)) == 1
    assert "attention.k" in found[0][0] and "its gradient on the rank with x = " in found[0][0]
    assert "that of one process" in found[0][0]


def test_a_wrong_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = TableExecutor.joined
    monkeypatch.setattr(TableExecutor, "joined", lambda self, found: 2 * joined(self, found))
    (words, _), *_ = placed(gpt(), cross_entropy, TOKENS, y=2)
    assert "the loss is" in words and "in one process" in words


def test_panels_are_tried_over_z_too(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = summa._Leaving.settle

    def lost(self: Any) -> None:
        self._under_way[:] = [(work, lambda: None) for work, _ in self._under_way]
        settle(self)

    assert placed(gpt(), cross_entropy, TOKENS, algorithm="2d", q=2) == [("", "")] * 4
    monkeypatch.setattr(summa._Leaving, "settle", lost)
    found = placed(gpt(), cross_entropy, TOKENS, algorithm="2d", q=2)
    assert all("weights have wrong gradients" in words for words, _ in found)


def test_what_is_not_tried_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed(gpt(), cross_entropy, TOKENS, y=2) == [("", "")] * 2

    calls = itertools.count()

    def changing(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        total, count = cross_entropy(model, batch)
        return total * (1 + next(calls)), count

    assert "same loss twice" in placed(gpt(), changing, TOKENS, y=2)[0][1]
    monkeypatch.setattr(trial, "MOST_PRODUCTS", 1000)
    assert "too much for a trial" in placed(gpt(), cross_entropy, TOKENS, y=2)[0][1]
    monkeypatch.setattr(trial, "MOST_RANKS", 2)
    assert "more than 2" in placed(gpt(), cross_entropy, TOKENS, y=4)[0][1]


def test_a_loss_may_keep_what_it_computes() -> None:
    """One rank of a trial runs at a time, until it waits: a name outside of the loss is not written by two at once."""
    model = gpt()

    def body(world: wire.World) -> None:
        kept = torch.empty(0)  # each outer rank is a process of its own, in earnest

        def keeping(called: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
            nonlocal kept
            kept = called(batch["tokens"][:, :8]) * 1.0
            return kept.square().sum(), 1

        plan = {"placement": {"tensor": {"algorithm": "4d", "x": 2, "y": 2}}}
        run = parallelize(copy.deepcopy(model), keeping, OptimizerOptions(), plan, world=world, example=TOKENS)
        assert run.placed.split is not None and run.placed.split.untried == ""

    wire.threads.launch(4, body)


def test_a_split_model_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_step", _failing(trial._step))
    (words, _), *_ = placed(gpt(), cross_entropy, TOKENS, y=2)
    assert "a step of the split model fails where the whole model's does not" in words and "broken" in words


def test_a_loss_that_holds_rows_against_one_another_is_tried_on_rows_that_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one row it has no gradient, and nothing could be wrong."""

    def contrast(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        features = F.normalize(model(batch["tokens"]).mean(1), dim=-1)
        return F.cross_entropy(features @ features.t(), torch.arange(len(features)), reduction="sum"), len(features)

    model, row = decoding(Sizes(heads=4, shared=2)).fresh(), {"tokens": TOKENS["tokens"][:1, :6]}
    assert placed(model, contrast, row, y=4) == [("", "")] * 4
    monkeypatch.setattr(splitting, "_summing", lambda axis: lambda gradient: gradient)
    assert all("attention.k" in words for words, _ in placed(model, contrast, row, y=4))


def test_a_model_is_placed_by_a_few_rows_of_its_first_batch() -> None:
    model = gpt()

    def body(world: wire.World) -> list[Tensor]:
        plan = {"placement": {"tensor": {"algorithm": "4d", "y": 2}}}
        run = parallelize(copy.deepcopy(model), cross_entropy, OptimizerOptions(), plan, world=world)
        run.step(TOKENS)
        assert run.placed.split is not None
        return list(run.placed.split.example.values())

    for (tokens,) in wire.threads.launch(2, body):
        assert torch.equal(tokens, TOKENS["tokens"][:3])


def test_the_trial_is_of_the_model_in_training() -> None:
    def in_training(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        total, count = cross_entropy(model, batch)
        return (total if model.training else total * torch.nan), count

    torch.manual_seed(0)
    model = GPT(Config(vocabulary=40, context=8, layers=2, width=24, heads=4, dropout=0.5))
    for whole in (model, model.eval()):  # training puts it into training
        assert placed(whole, in_training, TOKENS, x=2) == [("", "")] * 2


def test_python_is_warned_once_of_a_grid_that_was_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST_RANKS", 1)
    warned: list[str] = []
    monkeypatch.setattr(warnings, "warn", lambda message, *args, **kwargs: warned.append(str(message)))
    placed(gpt(), cross_entropy, TOKENS, y=2)
    (words,) = [words for words in warned if "the grid was not tried on numbers" in words]
    assert "features lie over 2 ranks, more than 1; try a smaller model of the kind" in words


def _failing(inner: Any) -> Any:
    def step(model: nn.Module, *about: Any) -> Any:
        if len(next(iter(model.parameters()))) != 40:  # a table that is cut
            raise RuntimeError("broken")
        return inner(model, *about)

    return step
