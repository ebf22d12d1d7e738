"""Numbers that ride behind a gradient arrive as they were given, whatever the gradient's element type."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fourfold import wire
from fourfold.ledger import Ledger
from fourfold.placement.seats import NUMBERS, Seats, parts, room
from fourfold.training.run import parallelize
from fourfold.training.tally import Tally
from fourfold.wire.errors import RankFailed
from plain import Work, gpt, on_threads

NUMBER = st.floats(-1e30, 1e30).filter(lambda number: number == 0 or abs(number) > 1e-20)


def test_a_rank_has_a_seat_for_every_number_of_its_tally() -> None:
    assert len(Tally._fields) == NUMBERS


@given(NUMBER)
def test_three_parts_are_exact_in_fp32_and_add_up(number: float) -> None:
    three = parts(number)
    assert torch.tensor(three, dtype=torch.float32).tolist() == list(three)
    assert math.fsum(three) == number


@given(st.integers(0, 2**52))
def test_a_digest_crosses_to_the_last_bit(digest: int) -> None:
    assert int(math.fsum(parts(float(digest)))) == digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_sum_over_ranks_is_every_ranks_numbers_in_order(ranks: int, dtype: torch.dtype) -> None:
    given_ = [[rank + 1 / 3, 1e9 + rank, float(2**52 - rank), float(rank == 1)] for rank in range(ranks)]

    def body(world: wire.World) -> list[list[float]]:
        axis = wire.Mesh(world, {"data": ranks}, Ledger())["data"]
        summed = torch.full((3 + room(ranks),), 7.0, dtype=dtype)
        seats = Seats(summed[3:], world.rank)
        for _ in range(2):  # a second step begins with the first one's sums in the seats
            seats.give(given_[world.rank])
            axis.all_reduce(summed, "gradient").wait()
        return seats.take()

    for taken in wire.threads.launch(ranks, body):
        assert taken == given_


def test_what_is_not_finite_stays_on_its_own_seat() -> None:
    elements = torch.zeros(room(2))
    mine, others = Seats(elements.clone(), 0), Seats(elements.clone(), 1)
    mine.give([math.inf, 1.0, 2.0, 0.0])
    others.give([0.5, math.nan, 2.0, 0.0])
    total: Tensor = mine._elements + others._elements
    first, second = Seats(total, 0).take()
    assert not math.isfinite(first[0]) and first[1:] == [1.0, 2.0, 0.0]
    assert second[0] == 0.5 and not math.isfinite(second[1])


@pytest.mark.parametrize(
    ("plan", "rides"),
    [
        ({"placement": {"data": 2}}, True),
        ({"placement": {"data": 2}, "wire": {"gradient": "bf16"}}, False),
        ({"placement": {"z": 2, "shard": "optimizer"}}, False),
        ({"placement": {"z": 2, "data": 2, "shard": "parameters"}}, False),
    ],
)
def test_a_message_of_its_own_is_sent_only_where_no_gradient_takes_the_numbers(plan: Any, rides: bool) -> None:
    outcome = on_threads(Work(gpt(), steps=1), plan)[0]
    assert outcome.measured == outcome.predicted
    control = {flow.axis: traffic.bytes for flow, traffic in outcome.measured.items() if flow.kind == "control"}
    control.pop("z", None)  # the gradient norm's
    others = plan["placement"].get("z", 1) * plan["placement"].get("data", 1) - 1
    assert list(control.values()) == ([] if rides else [others * NUMBERS * 8])


@pytest.mark.parametrize("placement", [{"data": 2}, {"z": 2, "shard": "optimizer"}])
def test_ranks_that_are_given_another_number_of_rows_are_told(placement: Any) -> None:
    work = Work(gpt(), steps=1)

    def body(world: wire.World) -> None:
        run = parallelize(work.fresh(), work.loss, work.options, {"placement": placement}, world=world)
        batch = work.batch(0)
        run.step({name: tensor[: len(tensor) - world.rank] for name, tensor in batch.items()})

    with pytest.raises(RankFailed, match="another number of rows"):
        wire.threads.launch(2, body)
