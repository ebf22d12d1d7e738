"""Optimizers against their published update, written out; flat shards against the plain twin."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fourfold.training.optimizer import (
    OptimizerError,
    OptimizerOptions,
    build,
    build_plain,
    group_of,
    learning_rate,
)


@dataclass
class FlatShard:
    parameter: nn.Parameter
    group: str


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_adamw_is_the_published_update():
    options = OptimizerOptions(betas=(0.9, 0.99), eps=1e-6, weight_decay=0.3)
    weight = drawn(5)
    shard = FlatShard(nn.Parameter(weight.clone()), "decay")
    optimizer = build(options, [shard])
    first, second = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for step in range(1, 4):
        gradient, lr = drawn(5), 0.1 / step
        shard.parameter.grad = gradient.clone()
        optimizer.step(lr)
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        weight = weight * (1 - lr * 0.3)
        weight = weight - lr * (first / (1 - 0.9**step)) / ((second / (1 - 0.99**step)).sqrt() + 1e-6)
        torch.testing.assert_close(shard.parameter.data, weight, rtol=1e-13, atol=1e-15)


def test_sgd_with_momentum_is_the_published_update():
    shard, weight, speed = FlatShard(nn.Parameter(drawn(4)), "decay"), None, torch.zeros(4, dtype=torch.float64)
    weight = shard.parameter.data.clone()
    optimizer = build(OptimizerOptions(name="sgd", momentum=0.8, weight_decay=0.2), [shard])
    for _ in range(3):
        gradient = drawn(4)
        shard.parameter.grad = gradient.clone()
        optimizer.step(0.5)
        speed = 0.8 * speed + gradient + 0.2 * weight
        weight = weight - 0.5 * speed
        torch.testing.assert_close(shard.parameter.data, weight, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    "options",
    [
        OptimizerOptions(weight_decay=0.1),
        OptimizerOptions(name="sgd", weight_decay=0.1),
        OptimizerOptions(name="sgd", momentum=0.9, weight_decay=0.1),
    ],
    ids=["adamw", "sgd", "momentum"],
)
def test_flat_shards_step_as_the_plain_twin_does(options):
    matrix, vector = nn.Parameter(drawn(3, 4)), nn.Parameter(drawn(4))
    plain = build_plain(options, [("matrix", matrix), ("vector", vector)])
    shards = [
        FlatShard(nn.Parameter(matrix.detach().flatten()[:7].clone()), "decay"),
        FlatShard(nn.Parameter(matrix.detach().flatten()[7:].clone()), "decay"),
        FlatShard(nn.Parameter(vector.detach().clone()), "plain"),
        FlatShard(nn.Parameter(drawn(0)), "decay"),
    ]
    flat = build(options, shards)
    for step in range(4):
        matrix.grad, vector.grad = drawn(3, 4), drawn(4)
        parts = [matrix.grad.flatten()[:7], matrix.grad.flatten()[7:], vector.grad, drawn(0)]
        for shard, part in zip(shards, parts, strict=True):
            shard.parameter.grad = part.clone()
        plain.step(0.1 * (step + 1))
        flat.step(0.1 * (step + 1))
    whole = torch.cat([shards[0].parameter, shards[1].parameter]).view(3, 4)
    torch.testing.assert_close(whole, matrix, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(shards[2].parameter.data, vector.data, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_allocated_at_once_changes_no_bit_of_torchs_sgd(momentum):
    mine, theirs = nn.Parameter(drawn(6)), None
    theirs = nn.Parameter(mine.detach().clone())
    optimizer = build_plain(OptimizerOptions(name="sgd", momentum=momentum), [("m", mine)])
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, foreach=False)
    for _ in range(3):
        mine.grad = drawn(6)
        theirs.grad = mine.grad.clone()
        optimizer.step(0.1)
        reference.step()
    assert torch.equal(mine, theirs)


def test_a_parameter_without_gradient_decays_as_one_with_zeros():
    absent = nn.Parameter(drawn(2, 2))
    zero = nn.Parameter(absent.detach().clone())
    options = OptimizerOptions(weight_decay=0.5)
    one, two = build_plain(options, [("w", absent)]), build_plain(options, [("w", zero)])
    zero.grad = torch.zeros(2, 2, dtype=torch.float64)
    one.step(0.1)
    two.step(0.1)
    assert torch.equal(absent, zero)
    assert absent.grad is not None and not torch.equal(absent.grad, torch.ones(2, 2))


def test_state_goes_out_and_in_and_continues_bit_for_bit():
    options = OptimizerOptions()
    weight, gradients = drawn(8), [drawn(8) for _ in range(6)]

    def run(shard, optimizer, steps):
        for step in steps:
            shard.parameter.grad = gradients[step].clone()
            optimizer.step(0.01)

    whole = FlatShard(nn.Parameter(weight.clone()), "decay")
    run(whole, build(options, [whole]), range(6))
    first = FlatShard(nn.Parameter(weight.clone()), "decay")
    before = build(options, [first])
    run(first, before, range(3))
    second = FlatShard(nn.Parameter(first.parameter.detach().clone()), "decay")
    after = build(options, [second])
    after.load_state_dict([{name: tensor.clone() for name, tensor in state.items()} for state in before.state_dict()])
    run(second, after, range(3, 6))
    assert torch.equal(second.parameter, whole.parameter)


def test_state_is_complete_from_the_start_and_has_the_shards_shape():
    shards = [FlatShard(nn.Parameter(drawn(5)), "decay"), FlatShard(nn.Parameter(drawn(0)), "plain")]
    optimizer = build(OptimizerOptions(), shards)
    state = optimizer.state_dict()
    assert [sorted(entry) for entry in state] == [["exp_avg", "exp_avg_sq", "step"]] * 2
    for shard, entry in zip(shards, state, strict=True):
        assert all(entry[name].shape == shard.parameter.shape for name in optimizer.state_names)
        assert entry["step"].shape == ()
    assert build(OptimizerOptions(name="sgd"), shards).state_dict() == [{}, {}]


def test_loading_the_wrong_state_says_what_was_expected():
    shard = FlatShard(nn.Parameter(drawn(5)), "decay")
    optimizer = build(OptimizerOptions(), [shard])
    with pytest.raises(OptimizerError, match="expected 1 entries, found 2"):
        optimizer.load_state_dict([{}, {}])
    with pytest.raises(OptimizerError, match=r"expected exp_avg, exp_avg_sq, step, found momentum_buffer"):
        optimizer.load_state_dict([{"momentum_buffer": drawn(5)}])
    wrong = {name: drawn(4) for name in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(1.0)}
    with pytest.raises(OptimizerError, match=r"exp_avg: expected shape \(5,\), found \(4,\)"):
        optimizer.load_state_dict([wrong])


def test_groups_follow_the_logical_shape():
    assert group_of("w", torch.zeros(2, 2, requires_grad=True)) == "decay"
    assert group_of("b", torch.zeros(2, requires_grad=True)) == "plain"
    assert group_of("w", torch.zeros(2, 2)) == "frozen"
    with pytest.raises(OptimizerError, match="found 'heavy'"):
        build(OptimizerOptions(), [FlatShard(nn.Parameter(drawn(1)), "heavy")])


def test_a_model_with_nothing_to_train_steps_in_peace():
    optimizer = build(OptimizerOptions(), [FlatShard(nn.Parameter(drawn(3), requires_grad=False), "frozen")])
    optimizer.step(0.1)
    assert optimizer.state_dict() == []


def test_the_rate_by_hand():
    linear = OptimizerOptions(lr=1.0, warmup=2, decay="linear", final=0.2, steps=6)
    assert [round(learning_rate(linear, step), 12) for step in range(8)] == [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    cosine = OptimizerOptions(lr=2.0, decay="cosine", final=0.0, steps=4)
    expected = [1 + math.cos(math.pi / 4), 1.0, 1 + math.cos(3 * math.pi / 4), 0.0]
    assert [learning_rate(cosine, step) for step in range(4)] == pytest.approx(expected, abs=1e-15)
    constant = OptimizerOptions(lr=3.0, warmup=3)
    assert [learning_rate(constant, step) for step in range(5)] == [1.0, 2.0, 3.0, 3.0, 3.0]


def test_the_rate_is_a_pure_function_and_ends_at_final_even_when_warmup_fills_the_run():
    options = OptimizerOptions(lr=1.0, warmup=5, decay="cosine", final=0.1, steps=5)
    forwards = [learning_rate(options, step) for step in range(7)]
    assert forwards == [learning_rate(options, step) for step in reversed(range(7))][::-1]
    assert forwards[4] == 1.0
    assert forwards[5] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": "adam"}, "name"),
        ({"lr": math.nan}, "lr"),
        ({"lr": -1.0}, "lr"),
        ({"decay": "sine"}, "decay"),
        ({"clip_norm": 3.0}, "clip_norm"),
        ({"steps": 0}, "steps"),
        ({"clip": math.inf}, "clip"),
        ({"clip": 0.0}, "clip"),
        ({"clip": -1.0}, "clip"),
    ],
)
def test_bad_options_are_named(settings, named):
    with pytest.raises(OptimizerError, match=rf"optimizer\.{named}: expected"):
        OptimizerOptions(**settings)
