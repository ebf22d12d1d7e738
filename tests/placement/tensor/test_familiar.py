"""Later batches of other lengths, on which code may call other functions than on the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.placement.tensor.split import Split
from plain import VOCABULARY, Work, assert_equal, disturbed, on_threads, serial

from .grouped import Sizes, decoder


class Branching(nn.Module):
    """An MLP that does something else to its inner features on sequences of more than six."""

    def __init__(self, beyond: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 12)
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)
        self.head, self.beyond = nn.Linear(12, VOCABULARY, bias=False), beyond

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        h = self.up(self.norm(x)).relu()
        return self.head(x + self.down(self.beyond(h) if tokens.shape[1] > 6 else h))


@dataclass(frozen=True)
class Growing(Work):
    """A step for every length."""

    lengths: tuple[int, ...] = (5, 8, 9, 5)

    def batch(self, step: int) -> dict[str, Tensor]:
        return Work(self.model, rows=self.rows, sequence=self.lengths[step]).batch(step)


def work(beyond: Callable[[Tensor], Tensor]) -> Growing:
    """Four steps of three rows."""
    torch.manual_seed(0)
    return Growing(disturbed(Branching(beyond).double()), rows=3, sequence=5, steps=4)


OTHERWISE = "calls other functions than on the first one, by which it would be cut in another way"
PLAN = {"placement": {"precision": "fp64", "tensor": {"algorithm": "4d", "y": 2}}}


@pytest.mark.parametrize(
    ("beyond", "words"),
    [
        (lambda h: h.flip(-1), "flip does not make of a part of the heads or features what it makes of all of them"),
        (lambda h: h - h.mean(-1, keepdim=True), OTHERWISE),
        (lambda h: h * h.softmax(-1), OTHERWISE),
    ],
)
def test_what_a_longer_sequence_leads_to_is_refused_before_it_is_computed(
    beyond: Callable[[Tensor], Tensor], words: str
) -> None:
    with pytest.raises(wire.RankFailed, match=words):
        on_threads(work(beyond), PLAN)


def test_a_rehearsal_is_held_again_only_where_other_functions_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    inner = Split.rehearse

    def counted(self: Split, stage: object) -> None:
        lengths.append(stage.batch["tokens"].shape[1])  # pyright: ignore[reportAttributeAccessIssue]
        inner(self, stage)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Split, "rehearse", counted)
    one = work(lambda h: h.sin())
    for found in on_threads(one, PLAN):
        assert_equal(found, serial(one))  # and every byte was predicted
    assert lengths == [5, 5, 8, 8]  # on two ranks; of 9, and of 5 again, nothing is new


def test_dropouts_follow_time_that_is_cut_at_every_length() -> None:
    one = Growing(decoder(Sizes(heads=4, shared=2)), rows=2, sequence=5, steps=3)
    for found in on_threads(one, {"placement": {"precision": "fp64", "tensor": {"algorithm": "1d-sequence", "y": 2}}}):
        assert_equal(found, serial(one))
