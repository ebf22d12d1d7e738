"""The time of a grid's step: sums by hand, and what overlap can and cannot do."""

from __future__ import annotations

import dataclasses

import pytest

from fourfold.hardware import Cluster, Link
from fourfold.hardware.sharing import Counted
from fourfold.planner.clock import LIKELY
from fourfold.planner.grids import grids
from fourfold.planner.network import Linear, Network
from fourfold.planner.pace import Pace
from fourfold.planner.stages import weigh_stages
from fourfold.planner.tolls import Factors, Job, Tolls

SLOW = dataclasses.replace(Cluster.parse("8 nodes of 1x h100_sxm"), inter=Link("slow", 0.0, 1e8))
NETWORK = Network.gpt(1024, 4, 16, vocabulary=4096, sequence=128)


def pace(grid, cluster=SLOW, network=NETWORK, **job):
    return Pace(Tolls(network, grid, Job(rows=32, **job)), cluster, Counted())


@pytest.mark.parametrize("grid", [Factors(2, 2, 2), Factors(1, 8), Factors(1, 1, 4, 2), Factors(8)])
def test_without_delay_time_is_bytes_over_bandwidth(grid):
    one = pace(grid)
    for axis, sent in one.tolls.sent().items():
        assert one.busy[axis] == pytest.approx(sent / (0.8 * 1e8), rel=1e-9)


@pytest.mark.parametrize("grid", list(grids(8)))
def test_overlap_hides_but_loses_nothing(grid):
    beside, after = pace(grid), pace(grid, overlap=False)
    hidden, plain = beside.timing(), after.timing()
    assert sum(plain.exposed.values()) == pytest.approx(sum(after.busy.values()), rel=1e-9)
    assert not plain.hidden or max(plain.hidden.values()) < 1e-9
    for axis, busy in beside.busy.items():
        assert hidden.exposed.get(axis, 0) + hidden.hidden.get(axis, 0) == pytest.approx(busy, rel=1e-9)
    assert sum(hidden.exposed.values()) <= sum(plain.exposed.values()) * (1 + 1e-12)


def test_an_input_gradients_sum_hides_behind_the_weight_gradient():
    network = Network("one", (Linear.of(4096, 4096),), 1, 4096)
    fast = dataclasses.replace(SLOW, inter=Link("fast", 0.0, 1e13))
    slow = dataclasses.replace(SLOW, inter=Link("slow", 0.0, 1e7))
    rows, grid = 4096, Factors(1, 8)
    job = Job(rows=rows)
    quick, late = (Pace(Tolls(network, grid, job), cluster, Counted()) for cluster in (fast, slow))
    assert quick.timing().exposed.get("y", 0) == 0
    product = 2 * rows * 4096 * 512 / (989e12 * 0.6)
    assert late.product(network.linears[0], rows) == pytest.approx(product)
    assert late.timing().exposed["y"] == pytest.approx(late.busy["y"] - product)


def test_narrow_products_are_bound_by_memory():
    network = Network("one", (Linear.of(4096, 4096),), 1, 4096)
    one = Pace(Tolls(network, Factors(), Job(rows=16)), SLOW, Counted())
    assert one.product(network.linears[0], 16) == pytest.approx(2 * (4096 * 4096 + 2 * 16 * 4096) / (3350e9 * 0.8))


def test_recomputation_computes_forward_again():
    plain, again = pace(Factors(2, 2, 2)).timing(), pace(Factors(2, 2, 2), recompute="full").timing()
    assert 1.2 < again.compute / plain.compute < 4 / 3
    assert again.exposed["x"] > plain.exposed["x"]


def test_slower_links_and_longer_delays_are_never_faster():
    for grid in (Factors(2, 2, 2), Factors(1, 2, 2, 2)):
        likely = pace(grid).timing().total
        assert pace(grid, dataclasses.replace(SLOW, inter=Link("slower", 0.0, 5e7))).timing().total > likely
        assert pace(grid, dataclasses.replace(SLOW, inter=Link("late", 1e-3, 1e8))).timing().total > likely


def test_one_stage_is_the_grid_itself():
    one = weigh_stages(NETWORK, SLOW, Factors(1, 2, 4), 1, Job(rows=32, microbatches=4))
    alone = Pace(Tolls(NETWORK, Factors(1, 2, 4), Job(rows=32, microbatches=4)), SLOW, Counted(), LIKELY).timing()
    assert one.seconds == pytest.approx(alone.total, rel=1e-9)
    assert one.bubble == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 16), (8, 32)])
def test_the_bubble_of_equal_stages(p, m):
    # (m + p - 1) turns of which p - 1 are bubble; without ends all stages are alike
    network = Network.gpt(1024, 8, 16, sequence=128)
    found = weigh_stages(network, SLOW, Factors(), p, Job(rows=m, microbatches=m))
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1), rel=1e-9)


def test_the_first_stage_holds_as_many_micro_batches_as_are_in_flight():
    network = Network.gpt(1024, 8, 16, sequence=128)
    few, many = (weigh_stages(network, SLOW, Factors(), 4, Job(rows=m, microbatches=m)) for m in (2, 16))
    assert many.memory["activations"] == 2 * few.memory["activations"]  # 4 instead of 2


def test_more_stages_than_blocks_cannot_be():
    assert "stages: 9 for 4 blocks" in weigh_stages(NETWORK, SLOW, Factors(), 9, Job(rows=9)).bound
