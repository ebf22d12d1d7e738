"""Rows of a batch that a grid cannot deal: every rank says the same, before anything is placed or sent."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold import wire
from fourfold.placement import placing
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.between import refuse_rows
from fourfold.plan import Plan
from fourfold.training.run import parallelize
from plain import Work, gpt

THREE_D = {"placement": {"precision": "fp64", "tensor": {"algorithm": "3d", "q": 2}}}


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(PlacementError) as found:
        call(*args)
    return str(found.value)


@pytest.mark.parametrize(
    ("placement", "microbatches", "rows", "each", "near"),
    [
        ({"q": 2}, 1, 6, 4, "4 and 8"),
        ({"q": 2}, 3, 13, 12, "12 and 24"),
        ({"q": 3}, 1, 5, 9, "9"),  # nothing below
        ({"q": 2}, 2, 15, 8, "8 and 16"),
    ],
)
def test_the_nearest_batch_sizes_are_named_and_fit(placement, microbatches, rows, each, near):
    chosen = Plan.of({"placement": {"tensor": {"algorithm": "3d", **placement}}}).placement
    said = refused(refuse_rows, chosen, rows, microbatches)
    assert f"expected a multiple of {each} rows, found {rows}; nearest batch sizes that fit: {near}." in said
    assert "over y = " in said and said.startswith("plan.placement.tensor: 3d")
    for size in near.split(" and "):
        refuse_rows(chosen, int(size), microbatches)


@pytest.mark.parametrize("algorithm", [{"algorithm": "4d", "x": 2, "y": 2}, {"algorithm": "2d", "q": 2}, None])
def test_who_does_not_cut_rows_again_takes_any_number(algorithm):
    refuse_rows(Plan.of({"placement": {"tensor": algorithm}}).placement, 7, 2)


def test_the_first_batch_is_refused_before_anything_is_placed(monkeypatch):
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was placed")

    monkeypatch.setattr(placing, "place", never)
    monkeypatch.setattr(placing, "Arena", never)
    work = Work(gpt(), rows=6)

    def rank(world: wire.World) -> str:
        run = parallelize(work.fresh(), work.loss, work.options, THREE_D, world=world)
        return refused(run.step, work.batch(0))

    (said,) = set(wire.threads.launch(8, rank))
    assert "found 6; nearest batch sizes that fit: 4 and 8" in said


def test_a_later_batch_is_refused_by_all_ranks_alike_and_training_goes_on():
    work, short = Work(gpt(), rows=4), Work(gpt(), rows=6)

    def rank(world: wire.World) -> tuple[str, str, list[int], float]:
        run = parallelize(work.fresh(), work.loss, work.options, THREE_D, world=world)
        run.step(work.batch(0))
        before = run.mesh.everyone.calls
        said = refused(run.step, short.batch(1)), refused(run.evaluate, [work.batch(2), short.batch(3)])
        calls = [before, run.mesh.everyone.calls]
        return *said, calls, run.step(work.batch(1)).loss

    found = wire.threads.launch(8, rank)
    assert len({one[:2] for one in found}) == len({one[3] for one in found}) == 1
    assert all(before == after for _, _, (before, after), _ in found)
