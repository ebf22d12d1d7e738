"""A placed model is not copied: it says so, and what it says to do instead works."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.placement.refusals import PlacementError
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from plain import SGD, Work, gpt

PLAIN, DROPPING = Work(gpt()), Work(gpt(0.1))
PLANS = [{}, {"data": 2}, {"z": 2, "shard": "optimizer"}, {"z": 2, "shard": "parameters"}, {"recompute": "full"}]


@pytest.mark.parametrize("work", [PLAIN, DROPPING])
@pytest.mark.parametrize("placement", PLANS)
def test_a_placed_model_is_not_copied_and_its_state_is(placement: dict[str, Any], work: Work) -> None:
    def body(world: wire.World) -> None:
        model = work.fresh()
        plain = copy.deepcopy(model).double()
        plan = {"placement": {**placement, "precision": "fp64"}}
        run = parallelize(model, work.loss, SGD, plan, world=world, example=work.batch(0))
        run.step(work.batch(0))
        for part in (run.model, run.model.get_submodule("blocks.1"), run.model.get_submodule("blocks.1.mlp")):
            with pytest.raises(PlacementError, match="cannot be copied or pickled: .* before parallelize"):
                copy.deepcopy(part)
        with pytest.raises(PlacementError, match="cannot be copied or pickled"):
            torch.save(run.model, io.BytesIO())  # noqa: TID251 (that it does not)
        plain.load_state_dict(run.model.state_dict())
        masters = run.logical_state()
        held = dict(plain.named_parameters())
        assert held.keys() == masters.keys()
        assert all(torch.equal(held[name], masters[name]) for name in masters)

    wire.threads.launch(2 if "data" in placement or "z" in placement else 1, body)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nor_is_a_part_that_takes_statistics(ranks: int) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return model(batch["x"]).square().sum(), len(batch["x"])

    built = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def body(world: wire.World, model: nn.Module) -> None:
        plan = {"placement": {"data": world.size}}
        batch = {"x": torch.linspace(0, 1, 12).view(4, 3)}
        run = parallelize(copy.deepcopy(model), loss, OptimizerOptions(), plan, world=world, example=batch)
        for part in (run.model, run.model.get_submodule("1")):
            with pytest.raises(PlacementError, match="cannot be copied or pickled"):
                copy.deepcopy(part)

    wire.threads.launch(ranks, body, built)
