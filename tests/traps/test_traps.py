"""Traps that no other room's tests reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.training.run import parallelize
from plain import SGD, Work, gpt, on_threads


@pytest.mark.parametrize("level", ["optimizer", "parameters"])
def test_a_block_travels_in_one_message(level: str) -> None:
    """A block of twelve weights is one gather and one scatter, whatever its weights are."""
    work = Work(gpt(), steps=2)
    placement = {"z": 2, "shard": level, "precision": "fp64"}
    found = on_threads(work, {"placement": placement})[0]
    weights = len(dict(work.model.named_parameters()))
    calls = sum(traffic.calls for flow, traffic in found.measured.items() if flow.kind != "control")
    units = len(work.model.get_submodule("blocks")._modules) + 2
    assert calls <= 3 * units < 3 * weights / 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_evaluation_counts_every_row_once(ranks: int) -> None:
    """Five rows of unequal counts in two batches, on ranks some of which have none."""
    work = Work(gpt(0.3), rows=3)
    batches = [work.batch(step) for step in (0, 1)]
    model = work.fresh().eval()
    with torch.no_grad():
        sums = [work.loss(model, batch) for batch in batches]
    expected = float(sum(total for total, _ in sums)) / float(sum(count for _, count in sums))

    def body(world: wire.World) -> float:
        plan = {"placement": {"z": world.size, "shard": "parameters", "precision": "fp64"}}
        run = parallelize(work.fresh(), work.loss, SGD, plan, world=world, example=work.batch(0))
        return run.evaluate([_Rows(batch) for batch in batches])

    assert wire.threads.launch(ranks, body) == [pytest.approx(expected, rel=1e-12)] * ranks


class _Rows:
    """A batch that hands out rows when asked."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.rows = tensors, len(tensors["tokens"])

    def __call__(self, rows: range) -> dict[str, Tensor]:
        return {name: tensor[rows.start : rows.stop] for name, tensor in self.tensors.items()}


class _Mixed(nn.Module):
    """A model whose head scale is kept in another type than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = gpt(dtype=torch.float32)
        self.scale = nn.Parameter(torch.full((37,), 1.5, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.plain(tokens) * self.scale


def test_weights_of_several_types_train_in_the_plans() -> None:
    """All weights take the plan's type, so one flat shard holds them; the numbers are those of a model of that type."""
    work = Work(_Mixed(), steps=2)
    plan: dict[str, Any] = {"placement": {"z": 2, "shard": "parameters", "precision": "fp64"}}
    mixed = on_threads(work, plan)[0]
    single = on_threads(Work(_Mixed().double(), steps=2), plan)[0]
    assert {weight.dtype for weight in mixed.weights.values()} == {torch.float64}
    assert mixed.losses == single.losses
