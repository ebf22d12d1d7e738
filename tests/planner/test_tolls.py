"""Bytes of a grid against the published formulas and their integer vectors (tensor-parallel.md 1.4 and 2.2)."""

from __future__ import annotations

from itertools import product as places
from math import prod

import pytest
import torch

from fourfold import wire
from fourfold.placement.tensor.product import product
from fourfold.planner.network import Band, Linear, Network
from fourfold.planner.tolls import AXES, LOSS_VALUES, Factors, Job, Tolls

ELEMENTS = Job(rows=32, itemsize=1, gradient=1, statistic=1, kept=0)
"""One byte an element, so that bytes are elements."""


def one(inputs, outputs, **settings):
    return Network("one", (Linear.of(inputs, outputs, **settings),), 1, inputs)


def elements(network, grid, job=ELEMENTS, at=None):
    listed = Tolls(network, grid, job, at).listed
    return tuple(sum(toll.sent for toll in listed if toll.when == when) for when in ("forward", "backward", "step"))


def test_the_integer_vectors():
    # M = 32, K = 16, N = 48, elements sent a rank, forward / backward
    assert elements(one(16, 48), Factors(2, 2, 2)) == (480, 320, 0)
    assert elements(one(16, 48), Factors(1, 8, 1)) == (0, 896, 0)  # 1D column
    assert elements(one(16, 48), Factors(8, 1, 1)) == (2688, 0, 0)  # 1D row
    assert elements(one(16, 48, transposed=True), Factors(1, 8, 1)) == (
        2688,
        0,
        0,
    )  # 1D row again: the pair of a column


def grids_of(*worlds):
    for world in worlds:
        for grid in places(range(1, world + 1), repeat=4):
            if Factors(*grid).world == world:
                yield Factors(*grid)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_formula_on_every_grid(transposed):
    rows, inputs, outputs = 144, 288, 576  # whole cache lines after every cut, so that nothing is padded
    network = one(inputs, outputs, transposed=transposed)
    job = Job(rows=rows, itemsize=2, gradient=4, kept=0)
    for grid in grids_of(6, 8, 12):
        c, r, d, g = grid if not transposed else (grid.y, grid.x, grid.z, grid.data)
        m, weight = rows / g, inputs * outputs / (c * r)
        forward = 2 * ((d - 1) / d * weight + 2 * (c - 1) / c * m * outputs / (d * r))
        backward = 2 * (2 * (d - 1) / d * weight + 2 * (r - 1) / r * m * inputs / (d * c))
        step = 4 * 2 * (g - 1) / g * weight / d
        assert elements(network, grid, job) == (forward, backward, step), grid


@pytest.mark.parametrize("z", [2, 3, 8])
def test_z_alone_is_sharded_data_parallelism(z):
    # planning.md 3.3: (d-1)/d of the weights, gathered twice and scattered once
    assert sum(elements(one(48, 96), Factors(1, 1, z))) == 3 * (z - 1) / z * 48 * 96


def block(hidden=768, heads=12, blocks=1):
    return Network.gpt(hidden, blocks, heads, sequence=1)


def activations(network, grid, job):
    return sum(toll.sent for toll in Tolls(network, grid, job).listed if toll.axis in "xy" and toll.where != "norms")


def test_a_transformer_block():
    # 8 e M h / (xyz) * [3(x - 1) + (y - 1)], M tokens of a data replica
    h, rows, e = 768, 96, 2
    for grid in grids_of(8, 12, 16):
        if 12 % grid.y:
            continue
        m = rows / grid.data
        expected = 8 * e * m * h / (grid.x * grid.y * grid.z) * (3 * (grid.x - 1) + grid.y - 1)
        assert activations(block(h), grid, Job(rows=rows)) == pytest.approx(expected, rel=1e-12), grid


def test_the_wide_features_of_contract_are_summed_in_backward():
    # Megatron-AxoNN's comm_model.py has them in forward; the layer says otherwise
    listed = Tolls(block(), Factors(2, 4, 1), Job(rows=8)).listed
    found = {toll.when: toll.elements for toll in listed if toll.where == "contract" and toll.axis in "xy"}
    assert found == {"forward": 8 * 768 // 2, "backward": 8 * 4 * 768 // 4}


def test_megatron_is_four_sums():
    # 8 e M h (p - 1) / p: four all-reduces of e M h
    assert activations(block(), Factors(1, 4, 1), Job(rows=32)) == 8 * 2 * 32 * 768 * 3 / 4


def test_norms_on_split_features():
    # LayerNorm 2 values a token each way, RMSNorm 1; share of the block's traffic at h = 4096: +0.02 % on 2 x 2 x 2
    def listed(network, grid, statistic):
        tolls = Tolls(network, grid, Job(rows=64, statistic=statistic)).listed
        return [toll for toll in tolls if toll.where == "norms"]

    def norms(*about):
        return sum(toll.sent for toll in listed(*about))

    gpt = Network.gpt(4096, 1, 32, sequence=1)
    llama = Network.llama(4096, 1, 32, 8, 14336, sequence=1)
    grid = Factors(2, 2, 2)
    assert norms(gpt, grid, 4) == 2 * (2 + 2) * 64 / 2 * 4  # 2(x-1)/x = 1
    assert norms(llama, grid, 4) == 2 * (1 + 1) * 64 / 2 * 4
    assert norms(gpt, grid, 2) / activations(gpt, grid, Job(rows=64)) == pytest.approx(0.0002, rel=0.25)
    assert norms(gpt, Factors(1, 8, 1), 4) == 0
    # one message each way, two norms a block: statistics are gathered, (x-1) 2t, and the row sums summed, 2(x-1)/x 2t
    found = {toll.when: (toll.op, toll.times, toll.sent) for toll in listed(gpt, Factors(4, 1, 2), 4)}
    assert found == {
        "forward": ("all_gather", 2, 2 * 3 * 2 * 32 * 4),
        "backward": ("all_reduce", 2, 2 * 2 * 3 * 2 * 32 * 4 // 4),
    }


def test_embedding_head_and_loss():
    network = Network.gpt(768, 0, 12, vocabulary=3072, sequence=16)
    grid, tokens = Factors(2, 4, 2), 8 // 2 * 16
    tolls = Tolls(network, grid, Job(rows=8)).listed
    found = {(toll.where, toll.when, toll.axis): toll for toll in tolls}
    assert found["embedding", "forward", "y"].sent == 2 * 3 / 4 * tokens * 768 / 2 * 2
    assert found["head", "forward", "x"].sent == 2 * 1 / 2 * tokens * 3072 / 4 * 2
    assert found["head", "backward", "y"].sent == 2 * 3 / 4 * tokens * 768 / 2 * 2
    exchanged = [toll for toll in tolls if toll.where == "loss"]
    assert [toll.op for toll in exchanged] == ["all_to_all", "all_gather"]
    assert sum(toll.sent for toll in exchanged) == 2 * 3 / 4 * LOSS_VALUES * tokens * 4
    # the outer weights: gathered once a micro-batch and kept
    outer = 3072 // 4 * 768 // 2 + 16 * 768 // 2 + 2 * 768 // 2
    assert found["outer", "forward", "z"].sent == outer / 2 * 2
    assert found["outer", "backward", "z"].sent == outer / 2 * 2


def test_accumulation_repeats_weights_but_not_the_sum_over_data():
    network, grid = block(blocks=3), Factors(1, 2, 2, 2)
    once, often = (Tolls(network, grid, Job(rows=64, microbatches=m)).sent() for m in (1, 4))
    assert often["y"] == once["y"]  # as many tokens in all
    assert often["z"] == 4 * once["z"]
    assert often["data"] == once["data"] > 0


def test_recomputation_repeats_forwards_sums():
    network, grid = block(), Factors(2, 2, 2)
    plain, again = (Tolls(network, grid, Job(rows=64, recompute=how)).listed for how in ("none", "full"))
    forward = [toll for toll in plain if toll.when == "forward" and toll.axis in "xy"]
    assert sum(toll.sent for toll in again) - sum(toll.sent for toll in plain) == sum(toll.sent for toll in forward)
    assert [toll for toll in again if toll.when != "again"] == list(plain)
    selective = Tolls(network, grid, Job(rows=64, recompute="selective")).listed
    assert selective == plain


def test_what_stays_cut_over_z():
    network, grid = block(blocks=4), Factors(1, 1, 4)
    weights = Tolls(network, grid, Job(rows=16)).block.gathered * 2 * 3 / 4

    def z(**settings):
        return Tolls(network, grid, Job(rows=16, microbatches=2, **settings)).sent()["z"]

    # two micro-batches, four blocks: gathers forward and back (the last block's is kept), and a scatter
    assert z(shard="parameters") == (2 * 4 + 2 * 3 + 2 * 4) * weights
    assert z(shard="parameters", kept=0) == (2 * 4 + 2 * 4 + 2 * 4) * weights
    assert z(shard="gradients") == (4 + 2 * 4) * weights
    assert z(shard="optimizer") == (4 + 4) * weights


def test_uneven_sizes_are_counted_rank_by_rank():
    """Over all ranks of a sum's group go 2(n - 1) times the tensor, however it divides."""
    network = Network("odd", (Linear("odd", Band(10), (Band(7),), bias=False),), 1, 10)
    grid, job = Factors(3, 2, 2), Job(rows=5, itemsize=1)
    sent = {"forward": 0, "backward": 0}
    for x, y, z in places(range(3), range(2), range(2)):
        for toll in Tolls(network, grid, job, Factors(x, y, z, 0)).listed:
            if toll.op == "all_reduce":
                sent[toll.when] += toll.sent
    assert sent["forward"] == 2 * (3 - 1) * 5 * 7  # rows 3 + 2 over z, outputs 4 + 3 over y
    assert sent["backward"] == 2 * (2 - 1) * 5 * 10


@pytest.mark.parametrize("sizes", [(2, 3, 2, 1), (3, 2, 1, 2), (1, 4, 3, 1), (4, 1, 1, 2)])
def test_the_meter_says_the_same_of_every_rank(sizes):
    """Real products of odd sizes on thread ranks: what each hands to the network over x and y, forward and back."""
    up, down = Linear.of(7, 11), Linear.of(11, 7, transposed=True)
    network = Network("odd", (up, down), 1, 7)

    def check(world):
        mesh = wire.Mesh(world, dict(zip(AXES, sizes, strict=True)))
        at = {axis: mesh[axis].index for axis in AXES}
        tolls = Tolls(network, Factors(*sizes), Job(rows=13, itemsize=8), Factors(*at.values()))
        x = torch.ones(max(tolls.tokens), up.local(tolls.sizes, at)[0], dtype=torch.float64, requires_grad=True)
        for linear in (up, down):
            inputs, outputs = linear.local(tolls.sizes, at)
            weight = torch.ones(outputs, inputs, dtype=torch.float64, requires_grad=True)
            (x,) = product(x, [weight], [None], contract=mesh[linear.contract], output=mesh[linear.across])
        x.sum().backward()
        metered = {axis: mesh.ledger.sent(axis=axis) for axis in ("x", "y")}
        assert metered == {axis: sent for axis, sent in tolls.sent().items() if axis in ("x", "y")}

    wire.threads.launch(prod(sizes), check)


def test_packed_heads_and_copies_of_keys_and_values():
    network = Network.llama(64, 1, 8, 2, 128, sequence=1)
    qkv = network.linears[0]
    sizes = {"x": 1, "y": 4}
    assert qkv.local(sizes, {"x": 0, "y": 0}) == (64, 16 + 8 + 8)  # two query heads, one key and one value head each
    copies = [toll for toll in Tolls(network, Factors(1, 4, 1), Job(rows=4)).listed if toll.where == "copies"]
    assert [(toll.size, toll.elements) for toll in copies] == [(2, 64 * 16)]
    assert not [toll for toll in Tolls(network, Factors(1, 2, 1), Job(rows=4)).listed if toll.where == "copies"]


def test_queries_go_with_their_keys():
    # 8 query heads of 8 share 4 keys: three ranks get 2, 1, 1 keys and twice as many queries; eight ranks a query each
    query = Network.llama(64, 1, 8, 4, 128).linears[1].inputs
    assert [query.local(3, index) for index in range(3)] == [4 * 8, 2 * 8, 2 * 8]
    assert [query.local(8, index) for index in range(8)] == [8] * 8


def test_parameters_are_the_published_count():
    # Narayanan et al. 2021, table 1: 76.1 billion
    network = Network.gpt(10240, 60, 80, vocabulary=51200)
    assert network.parameters == 12 * 60 * 10240**2 + 13 * 60 * 10240 + (51200 + 2048) * 10240 + 2 * 10240
    assert round(Network.llama(4096, 32, 32, 8, 14336, vocabulary=128256).parameters / 1e9, 2) == 8.03
