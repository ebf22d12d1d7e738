"""Plans that cut features, verified: exact to double precision, or to what the model itself rounds to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.models import gpt
from fourfold.plan import Plan
from fourfold.training.batch import Held
from fourfold.training.losses import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.verify.case import Case, Evidence, examine
from fourfold.verify.verdict import Verdict
from fourfold.wire.threads import launch

SHAPE = gpt.Config(vocabulary=31, context=8, layers=2, width=12, heads=3, dropout=0.1)


class RoundingNorm(nn.Module):
    """An RMS norm that computes in float32 whatever it is given, as Llama's does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        narrow = x.to(torch.float32)
        return self.weight * (narrow * torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def model(rounding: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = gpt.GPT(SHAPE)
    if rounding:
        made.norm = RoundingNorm(SHAPE.width)  # pyright: ignore[reportAttributeAccessIssue]
    return made.double()


def verdict(placement: dict[str, Any], *, rounding: bool = False, microbatches: int = 1) -> Verdict:
    template = model(rounding)

    def batch(number: int) -> Held:
        generator = torch.Generator().manual_seed(number)
        return Held({"tokens": torch.randint(31, (5, 9), generator=generator)})

    settings = {"placement": {"precision": "fp64", **placement}, "schedule": {"microbatches": microbatches}}
    case = Case(
        model=lambda: (copy.deepcopy(template), None),
        plain=lambda: copy.deepcopy(template),
        loss=cross_entropy,
        options=OptimizerOptions(name="sgd", lr=0.5, clip=1.0),
        plan=Plan.of(settings),
        batch=batch,
        seed=3,
        steps=2,
    )
    evidence = launch(case.plan.world, examine, case)
    assert [Evidence.from_dict(one.to_dict()) for one in evidence] == evidence
    return Verdict.of(case.plan, evidence, "threads")


@pytest.mark.parametrize(
    "placement",
    [
        {"tensor": {"algorithm": "4d", "x": 2, "y": 2}},
        {"tensor": {"algorithm": "4d", "x": 3}, "data": 2, "recompute": "full"},
        {"tensor": {"algorithm": "4d", "y": 3}, "z": 2, "shard": "optimizer"},
    ],
    ids=str,
)
def test_grids_equal_serial(placement: dict[str, Any]) -> None:
    found = verdict(placement, microbatches=2)
    assert found.ok and found.exact and found.allowed == 1e-12, found.text()


def test_a_norm_that_rounds_sums_over_features_is_named_and_held_to_its_own_type() -> None:
    found = verdict({"tensor": {"algorithm": "4d", "x": 3}}, rounding=True)
    assert found.narrow == "norm" and "rounds     norm computes in float32 whatever it is given" in found.text()
    assert found.ok and found.allowed == 1e-5 and 1e-12 < found.worst.error < 1e-6


def test_without_a_grid_the_reference_with_its_rows_cut_says_how_far() -> None:
    found = verdict({"z": 2, "shard": "parameters"}, rounding=True)
    assert found.ok and found.allowed < 1e-5 and "rounds  " not in found.text()
