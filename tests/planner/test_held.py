"""Memory of a grid's rank against the published formulas."""

from __future__ import annotations

import pytest

from fourfold.hardware import Cluster
from fourfold.planner.formulas import layer, states
from fourfold.planner.held import ACTIVATIONS, BUFFERS, GRADIENTS, OPTIMIZER, PARAMETERS, block_keeps, held
from fourfold.planner.network import Network
from fourfold.planner.tolls import Factors, Job, Tolls

CLUSTER = Cluster.parse("128 nodes of 8x a100_sxm_80gb")
H, HEADS, S = 6144, 64, 2048


def gpt(blocks=1, **settings):
    return Network.gpt(H, blocks, HEADS, sequence=S, **settings)


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_block_keeps_what_korthikanti_counted(t, recompute):
    tolls = Tolls(gpt(), Factors(1, t), Job(rows=4, recompute=recompute, flash=False))
    assert block_keeps(tolls, 4 * S) == pytest.approx(layer(S, 4, H, HEADS, t, recompute=recompute), rel=1e-12)


@pytest.mark.parametrize("grid", [Factors(2, 4), Factors(4, 2, 2), Factors(3, 2)])
def test_what_lies_on_the_residual_stream_is_cut_over_x(grid):
    tolls = Tolls(gpt(), grid, Job(rows=4 * grid.z, flash=False))
    expected = S * 4 * H * (10 / grid.x + 24 / grid.y + 5 * HEADS * S / (H * grid.y))
    assert block_keeps(tolls, 4 * S) == pytest.approx(expected, rel=1e-12)


def test_flash_attention_keeps_a_number_a_head():
    plain, flash = (block_keeps(Tolls(gpt(), Factors(), Job(rows=1, flash=how)), S) for how in (False, True))
    assert plain - flash == 5 * HEADS * S * S - 4 * HEADS * S


def test_full_recomputation_keeps_inputs_and_one_block():
    tolls = Tolls(gpt(blocks=8), Factors(2, 4), Job(rows=4, recompute="full"))
    found = held(tolls, CLUSTER)[ACTIVATIONS]
    assert found == 8 * 2 * S * 4 * H / 2 + block_keeps(tolls, 4 * S)


def test_states_are_18_bytes_a_parameter_without_z():
    # Megatron in 16 bits: 2 weight, 4 gradient, 4 master, 8 moments, of 12 L h^2
    found = held(Tolls(gpt(blocks=48), Factors(1, 8), Job(rows=4)), CLUSTER)
    total = found[PARAMETERS] + found[GRADIENTS] + found[OPTIMIZER]
    assert total == pytest.approx(states(H, 48, 8, 1), rel=1e-3)  # biases and norms besides


def test_everything_shrinks_with_z():
    one, four = (held(Tolls(gpt(blocks=48), Factors(1, 1, z), Job(rows=4)), CLUSTER) for z in (1, 4))
    assert four[OPTIMIZER] == one[OPTIMIZER] / 4
    assert four[PARAMETERS] == (4 / 6) * one[PARAMETERS] / 4  # no 16-bit copy lies beside the shard
    assert one[BUFFERS] == 0 < four[BUFFERS] < one[PARAMETERS] / 4


def test_logits_are_cut_over_y():
    small = gpt(vocabulary=51200)
    found = [held(Tolls(small, Factors(1, y), Job(rows=4)), CLUSTER)[ACTIVATIONS] for y in (1, 8)]
    bare = [held(Tolls(gpt(), Factors(1, y), Job(rows=4)), CLUSTER)[ACTIVATIONS] for y in (1, 8)]
    # planning.md 2.2: 4sbh(1 + V/(ht)), the last norm's input and the head's whole
    assert found[0] - bare[0] == pytest.approx(4 * S * 4 * H * (1 + 51200 / H), rel=1e-12)
    assert found[1] - bare[1] == pytest.approx(4 * S * 4 * H * (1 + 51200 / (8 * H)), rel=1e-12)


def test_a_gated_mlp_keeps_gate_activated_gate_up_and_their_product():
    network = Network.llama(4096, 1, 32, 8, 14336, sequence=S)
    inputs_of_norms, read = 2 * 4096, 4096 + 4096 + 4096  # by q|k|v, by o, by gate|up
    attended = 4096 + 2 * 1024
    elements = inputs_of_norms + read + attended + 4 * 14336
    assert block_keeps(Tolls(network, Factors(), Job(rows=1)), S) == S * (2 * elements + 4 * 32)
