"""A model that leaves blocks out in some steps (LayerDrop): never more bytes than forecast, and the same numbers."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.ledger import Flow, Traffic
from fourfold.models.gpt import GPT, Config
from fourfold.training.run import parallelize
from plain import Work, disturbed

STEPS = [set(left_out) for count in range(4) for left_out in combinations(range(3), count)]
"""Every choice of blocks to leave out."""
GATHERED = Flow("z", "weight", "all_gather")


class Dropped(GPT):
    """Leaves out the blocks whose numbers are in `left_out`."""

    left_out: set[int] = set()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for number, block in enumerate(self.blocks):
            if number not in self.left_out:
                x = block(x)
        return self.head(self.norm(x))


def work() -> Work:
    torch.manual_seed(0)
    model = Dropped(Config(37, context=16, layers=3, width=12, heads=3, hidden=30))
    return Work(disturbed(model.double()), rows=4)


def trained(world: wire.World, task: Work, plan: dict) -> tuple[list[float], list[dict[Flow, Traffic]], dict]:
    """(losses, traffic of every step, forecast)."""
    run = parallelize(task.fresh(), task.loss, task.options, plan, world=world, example=task.batch(0))
    assert isinstance(run.model, Dropped)
    losses: list[float] = []
    for number, left_out in enumerate(STEPS):
        run.model.left_out = left_out
        losses.append(run.step(task.batch(number)).loss)
    return losses, [run.ledger.traffic(number) for number in range(len(STEPS))], run.forecast().traffic()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("level", ["optimizer", "gradients", "parameters"])
def test_bytes_are_at_most_the_forecast(level: str, overlap: bool) -> None:
    task = work()
    alone, _, _ = trained(wire.join(), task, {"placement": {"precision": "fp64"}})
    plan = {"placement": {"z": 2, "shard": level, "overlap": overlap, "precision": "fp64"}}
    for losses, steps, forecast in wire.threads.launch(2, trained, task, plan):
        assert losses == pytest.approx(alone, rel=1e-12)
        assert steps[0] == forecast
        for moved in steps[1:]:
            assert moved.keys() == forecast.keys()
            assert {flow for flow in moved if moved[flow] != forecast[flow]} <= {GATHERED}
            assert moved[GATHERED].bytes <= forecast[GATHERED].bytes
        assert (steps[1] != forecast) == (level == "parameters")  # the gathers of block 0 that did not happen
