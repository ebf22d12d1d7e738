"""Settings of torch's modules that ranks with other rows cannot share are refused by name, with a way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.placement.refusals import PlacementError
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize


class Around(nn.Module):
    """The odd module under a name, and a weight beside it."""

    def __init__(self, odd: nn.Module, looks_up: bool):
        super().__init__()
        self.odd, self.head, self.looks_up = odd, nn.Linear(6, 2), looks_up

    def forward(self, x: Tensor) -> Tensor:
        found = self.odd((x * 4).long().clamp(0, 4)) if self.looks_up else self.odd(x[:, None].expand(-1, 3, -1))
        return self.head(found.flatten(1)[:, :6])


def squares(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(batch["x"]).square().sum(), len(batch["x"])


def start(ranks: int, model: Callable[[], nn.Module]) -> float:
    """The loss of a step."""

    def body(world: wire.World) -> float:
        batch = {"x": torch.linspace(0, 1, 24).view(4, 6)}
        plan = {"placement": {"data": world.size}}
        run = parallelize(models.pop(), squares, OptimizerOptions("sgd"), plan, world=world, example=batch)
        return run.step(batch).loss

    torch.manual_seed(0)
    first = model()
    models = [first]
    for _ in range(ranks - 1):
        models.append(model())
        models[-1].load_state_dict(first.state_dict())
    return wire.threads.launch(ranks, body)[0]


CASES = {
    "is a Embedding with max_norm=1.0": lambda: Around(nn.Embedding(5, 2, max_norm=1.0), True),
    "is a EmbeddingBag with max_norm=1.0": lambda: Around(nn.EmbeddingBag(5, 6, max_norm=1.0), True),
    "is a Embedding with scale_grad_by_freq": lambda: Around(nn.Embedding(5, 2, scale_grad_by_freq=True), True),
    "is a InstanceNorm1d with track_running": lambda: Around(nn.InstanceNorm1d(3, track_running_stats=True), False),
}


@pytest.mark.parametrize("words", CASES)
def test_what_depends_on_the_rows_of_a_rank_is_refused_on_several(words: str) -> None:
    with pytest.raises(wire.RankFailed, match=f"odd {words}.* set ") as caught:
        start(2, CASES[words])
    assert isinstance(caught.value.__cause__, PlacementError)
    start(1, CASES[words])


@pytest.mark.parametrize("ranks", [1, 2])
def test_sparse_gradients_are_refused_and_frozen_ones_not(ranks: int) -> None:
    with pytest.raises(wire.RankFailed, match="odd is a Embedding with sparse=True.* set sparse=False") as caught:
        start(ranks, lambda: Around(nn.Embedding(5, 2, sparse=True), True))
    assert isinstance(caught.value.__cause__, PlacementError)
    start(ranks, lambda: Around(nn.Embedding(5, 2, sparse=True).requires_grad_(False), True))


def test_a_frozen_instance_norm_is_placed() -> None:
    def frozen() -> nn.Module:
        model = Around(nn.InstanceNorm1d(3, track_running_stats=True), False)
        model.odd.eval()
        return model

    assert start(2, frozen) == pytest.approx(start(1, frozen))
