"""Ranking of grids: brute force, the published optimum, scale, and reasons in words."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fourfold.hardware import Cluster, Link
from fourfold.hardware.catalogue import PUBLISHED
from fourfold.hardware.sharing import Counted, Published
from fourfold.planner.grids import GridError, check, grids, nearest, obstacle, rank_grids, text, weigh
from fourfold.planner.network import Network
from fourfold.planner.tolls import AXES, Factors, Job, Tolls

WIDTHS = ((1, 3, False), (1, 1, True), (1, 4, False), (4, 1, True))
"""A GPT block's linears in units of h: inputs, outputs, transposed."""


def slow(world):
    """Nodes of one device, links of 200 Mbit/s without delay: time is bytes."""
    cluster = Cluster.parse(f"{world} nodes of 1x h100_sxm")
    return dataclasses.replace(cluster, inter=Link("200mbit", 0.0, 25e6))


def formula(grid, tokens, h, e=2.0, g=4.0):
    """Bytes of one block's step, weights alone, gathered again in backward: written out for every linear."""
    x, y, z, data = grid
    m, total = tokens / data, 0.0
    for inputs, outputs, transposed in WIDTHS:
        c, r = (y, x) if transposed else (x, y)
        weight = inputs * outputs * h * h / (x * y)
        total += e * 3 * (z - 1) / z * weight + g * 2 * (data - 1) / data * weight / z
        total += e * (2 * (c - 1) / c * m * outputs * h / (z * r) + 2 * (r - 1) / r * m * inputs * h / (z * c))
    return total


def bare(h, heads):
    """A block without what the formula leaves out."""
    network = Network.gpt(h, 1, heads, sequence=1)
    linears = tuple(dataclasses.replace(linear, bias=False) for linear in network.linears)
    return dataclasses.replace(network, linears=linears, norms=0)


@pytest.mark.parametrize(("world", "count"), [(6, 16), (8, 20), (12, 40), (30, 64), (64, 84)])
def test_every_factorisation_once(world, count):
    found = list(grids(world))
    assert len(set(found)) == len(found) == count
    assert all(grid.world == world for grid in found)


@pytest.mark.parametrize("world", [8, 12, 16, 64])
@pytest.mark.parametrize("ratio", [0.25, 1, 4, 16])
def test_the_best_grid_moves_the_fewest_bytes(world, ratio):
    h, heads = 1536, 192
    tokens = int(ratio * h)
    job = Job(rows=tokens, kept=0, overlap=False)
    ranked = rank_grids(bare(h, heads), slow(world), jobs=job)
    fewest = min(formula(grid, tokens, h) for grid in grids(world) if grid.y <= heads)
    best = ranked[0]
    assert best.bytes == pytest.approx(fewest, rel=1e-12)
    assert all(one.bytes == pytest.approx(formula(one.grid, tokens, h), rel=1e-12) for one in ranked if one.fits)
    assert [one.seconds for one in ranked if one.fits] == sorted(one.seconds for one in ranked if one.fits)


@pytest.mark.parametrize("world", [8, 16, 64])
def test_fewer_bytes_than_1d_wherever_the_formula_says_so(world):
    network, job = bare(1024, 64), Job(rows=64)
    one_d = sum(Tolls(network, Factors(1, world), job).sent().values())
    says_so = []
    for x in (2**power for power in range(world.bit_length())):
        y = world // x
        sent = sum(Tolls(network, Factors(x, y), job).sent().values())
        fewer = 3 * (x - 1) + y - 1 < world - 1
        assert (sent < one_d) == fewer, (x, y)
        says_so += [(x, y)] if fewer else []
    assert {8: (2, 4), 16: (2, 8), 64: (4, 16)}[world] in says_so


def test_the_optimum_at_fixed_xy():
    # y = sqrt(3xy), x = sqrt(xy/3); of 64 among powers of two x = 4, y = 16
    network, job = bare(1024, 64), Job(rows=64)
    sent = {x: sum(Tolls(network, Factors(x, 64 // x), job).sent().values()) for x in (1, 2, 4, 8, 16, 32, 64)}
    assert min(sent, key=lambda x: sent[x]) == 4
    wide = {x: 3 * (x - 1) + 4800 / x - 1 for x in range(1, 4801) if not 4800 % x}
    assert min(wide, key=lambda x: wide[x]) == math.sqrt(4800 / 3)


def test_what_the_model_says_of_slow_links():
    # a GPT with M = 4h tokens a step on 8 ranks: 1.7 over the better of y = 8 and z = 8; x 2 y 4 over y 8: 1.17
    h = 1024
    network, job = bare(h, 16), Job(rows=4 * h, kept=0)
    sent = {grid: sum(Tolls(network, grid, job).sent().values()) for grid in grids(8) if grid.y <= 16}
    assert sent[Factors(1, 8)] / sent[Factors(2, 4)] == pytest.approx(7 / 6)
    rivals = min(sent[Factors(1, 8)], sent[Factors(1, 1, 8)])
    best = min(sent, key=lambda grid: sent[grid])
    assert best == Factors(1, 4, 2) and rivals / sent[best] == pytest.approx(1.7, rel=0.01)
    ranked = rank_grids(network, slow(8), jobs=job)
    assert ranked[0].grid == best


def test_4096_devices_of_an_80b_model():
    network = Network.gpt(12288, 42, 96, vocabulary=51200)
    grid, rows = Factors(4, 8, 16, 8), 1024
    job = Job(rows=rows, recompute="full", kept=0)
    found = weigh(network, Cluster.parse("1024 nodes of perlmutter"), grid, job)
    m, h, e, v = rows // 8 * 2048, 12288, 2, 51200
    tokens = m // 16
    block = 8 * e * m * h / (4 * 8 * 16) * (3 * 3 + 7)
    again = e * m * h / (4 * 8 * 16) * (14 * 3 + 4 * 7)  # forward's share of it: qkv and expand over x, the others y
    gathered, summed = 3 * tokens * 2 * 4, 2 * 3 / 4 * tokens * 2 * 4  # of a norm, forward and backward
    ends = e * (2 * 7 / 8 * tokens * h / 4 + 2 * 3 / 4 * tokens * v / 8 + 2 * 7 / 8 * tokens * h / 4)
    loss = 2 * 7 / 8 * 2 * tokens * 4
    expected = 42 * (block + again + 2 * (2 * gathered + summed)) + gathered + summed + ends + loss
    assert found.sent["x"] + found.sent["y"] == pytest.approx(expected, rel=1e-12)
    weights = 12 * h * h / 32 + 7 * h / 8 + 6 * h / 4  # biases of normal ones over y; the others, and norms, over x
    outer = (v / 8 + 2048 + 2) * h / 4
    assert found.sent["z"] == pytest.approx(e * 15 / 16 * (3 * 42 * weights + 2 * outer), rel=1e-12)
    assert found.sent["data"] == pytest.approx(4 * 2 * 7 / 8 * (42 * weights + outer) / 16, rel=1e-12)
    assert found.fits


def test_ranking_4096_devices_knows_every_grid():
    network = Network.gpt(12288, 42, 96, vocabulary=51200)
    among = [grid for grid in grids(4096) if grid.x <= 4 and 8 <= grid.y <= 32]
    ranked = rank_grids(network, Cluster.parse("1024 nodes of perlmutter"), jobs=Job(rows=4096), among=among)
    assert len(ranked) == len(among) and {one.grid for one in ranked} == set(among)
    assert [one.fits for one in ranked] == sorted((one.fits for one in ranked), reverse=True)


def test_grids_that_are_not_powers_of_two():
    network = Network.gpt(768, 4, 12, vocabulary=3000, sequence=64)
    ranked = rank_grids(network, Cluster.parse("3 nodes of 4x a100_sxm_80gb"), jobs=Job(rows=24))
    assert {one.grid for one in ranked if one.fits} >= {Factors(2, 3, 2, 1), Factors(3, 2, 1, 2), Factors(1, 12, 1, 1)}


@pytest.mark.parametrize(
    ("grid", "rows", "said"),
    [
        (Factors(1, 16), 64, "qkv: 12 heads cannot be cut over y = 16"),
        (Factors(1, 6), 64, "heads: 4 key-value heads over y = 6: expected at most 4 ranks, or a multiple"),
        (Factors(96, 1), 64, "qkv: 48 features cannot be cut over x = 96"),
        (Factors(1, 12, 1), 64, "head: 10 features cannot be cut over y = 12"),
        (Factors(1, 1, 4, 4), 8, "rows: z 4 x data 4 x 1 micro-batches need 16 rows a step, and there are 8"),
    ],
)
def test_why_a_grid_cannot_be(grid, rows, said):
    shared = 4 if grid.y == 6 else 12
    network = dataclasses.replace(Network.gpt(48, 2, 12, vocabulary=10, sequence=8), kv_heads=shared)
    assert said in obstacle(network, grid, Job(rows=rows))
    with pytest.raises(GridError, match="try x") as refused:
        check(network, grid, Job(rows=rows))
    assert said in str(refused.value)


def test_the_nearest_grids_are_like_the_one_that_was_asked_for():
    network = Network.gpt(24, 2, 6, sequence=8)
    assert nearest(network, Factors(1, 8, 1, 1), Job(rows=8))[0] == Factors(2, 4, 1, 1)
    check(network, Factors(2, 4), Job(rows=8))


def test_losers_say_what_bound_them():
    network = Network.gpt(12288, 42, 96, vocabulary=51200)
    cluster = Cluster.parse("16 nodes of perlmutter")
    ranked = rank_grids(network, cluster, jobs=Job(rows=64, recompute="full"))
    best = ranked[0]
    reasons = {one.grid: one.behind(best) for one in ranked[1:]}
    assert reasons[Factors(1, 1, 1, 64)].startswith("memory: ")
    assert any("waiting for x +" in reason for reason in reasons.values())
    table = text(ranked, shown=5)
    assert str(best.grid) in table and f"and {len(ranked) - 5} more" in table
    with pytest.raises(GridError, match="needs 128 devices, and the machine has 64"):
        weigh(network, cluster, Factors(1, 1, 128), Job(rows=128))


def test_each_grid_takes_the_job_that_suits_it():
    network = Network.gpt(12288, 42, 96, vocabulary=51200)
    jobs = [Job(rows=1024, recompute=how) for how in ("none", "full")]
    ranked = rank_grids(network, Cluster.parse("256 nodes of perlmutter"), jobs=jobs, among=[Factors(1, 4, 16, 16)])
    assert ranked[0].fits and ranked[0].job.recompute == "full"


@pytest.mark.parametrize("sharing", [Counted(), Published(), PUBLISHED["perlmutter"]])
def test_every_bandwidth_model_ranks(sharing):
    network = Network.gpt(4096, 8, 32, vocabulary=51200)
    ranked = rank_grids(network, Cluster.parse("8 nodes of perlmutter"), jobs=Job(rows=64), sharing=sharing)
    best = ranked[0]
    assert best.fits and best.low <= best.seconds <= best.high
    assert sum(best.busy.values()) <= sum(best.timing.exposed.values()) + sum(best.timing.hidden.values()) + 1e-12
    assert set(best.sent) == set(AXES)
