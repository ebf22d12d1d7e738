"""Dropout wherever the rows of a batch lie, on several ranks, equals one process; and what cannot is said."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold import wire
from fourfold.anatomy import survey
from fourfold.training.run import parallelize
from fourfold.wire.errors import RankFailed
from plain import SGD, VOCABULARY, Work, assert_equal, disturbed, on_threads, rank, serial

WIDTH = 12
Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Tokens to logits; between them is `body`, from and to [rows, time, WIDTH]."""

    def __init__(self, body: Forward, **layers: nn.Module) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.body = body
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self, self.table(tokens)))


def encoder() -> Net:
    """torch's own encoder as it is by default: time first. Its masks have whole rows in no dim 0."""
    layer = nn.TransformerEncoderLayer(WIDTH, 3, 20, dropout=0.2)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Net(
        lambda net, x: net.drop(net.encoder(x.transpose(0, 1))).transpose(0, 1), encoder=layers, drop=nn.Dropout(0.3)
    )


def lstm() -> Net:
    """Time first, three layers, dropout between them."""
    layers = nn.LSTM(WIDTH, WIDTH, 3, dropout=0.3)
    return Net(lambda net, x: net.lstm(x.transpose(0, 1))[0].transpose(0, 1), lstm=layers)


def flat() -> Net:
    """Time × rows in one dim."""

    def body(net: Any, x: Tensor) -> Tensor:
        times = x.shape[1]
        return net.drop(x.transpose(0, 1).reshape(-1, WIDTH)).view(times, -1, WIDTH).transpose(0, 1)

    return Net(body, drop=nn.Dropout(0.3))


def views() -> Net:
    """Two views of every row beside each other: views × rows in one dim."""

    def body(net: Any, x: Tensor) -> Tensor:
        first, second = net.drop(torch.cat([x, x.flip(1)])).chunk(2)
        return first + second

    return Net(body, drop=nn.Dropout(0.3))


def weight() -> Net:
    """Dropped connections: a mask that all rows share."""
    return Net(
        lambda net, x: F.linear(x, net.drop(net.linear.weight)), linear=nn.Linear(WIDTH, WIDTH), drop=nn.Dropout(0.3)
    )


def channels() -> Net:
    """Channels, and alpha dropout, with features first."""

    def body(net: Any, x: Tensor) -> Tensor:
        y = F.dropout1d(x.transpose(0, 1), 0.2)
        return F.alpha_dropout(y.permute(2, 0, 1), 0.2, training=True).permute(2, 1, 0)

    return Net(body)


NETS = {make.__name__: make for make in (encoder, lstm, flat, views, weight, channels)}


def work_of(net: Net, rows: int = 6, sequence: int = 12) -> Work:
    """A sequence that divides by the local rows of 1, 2 and 3 ranks: nothing but the survey can tell them apart."""
    return Work(disturbed(net.double()), rows=rows, sequence=sequence, steps=3)


@functools.cache
def work_with(make: str) -> Work:
    torch.manual_seed(0)
    return work_of(NETS[make]())


@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize(
    "plan",
    [
        {"placement": {"data": 2, "precision": "fp64"}},
        {"placement": {"data": 3, "precision": "fp64", "recompute": "full"}, "schedule": {"microbatches": 2}},
        {"placement": {"z": 2, "shard": "parameters", "precision": "fp64", "recompute": "selective"}},
    ],
    ids=["2", "3 recomputed", "2 sharded"],
)
def test_equal_to_one_process(make: str, plan: dict[str, Any]) -> None:
    work = work_with(make)
    anatomy = survey(work.model, work.loss, work.batch(0))
    assert anatomy.layouts and anatomy.inexact == ()
    expected = serial(work)
    for found in on_threads(work, plan):
        assert_equal(found, expected)


def test_without_the_survey_masks_would_differ() -> None:
    """The control: the same model, its rows taken to be in dim 0."""
    work = work_with("encoder")
    expected = serial(work)

    def blind(world: wire.World) -> list[float]:
        run = parallelize(
            work.fresh(),
            work.loss,
            SGD,
            {"placement": {"data": 2, "precision": "fp64"}},
            world=world,
            example=work.batch(0),
        )
        run.placed.anatomy.layouts.clear()
        return [run.step(work.batch(step)).loss for step in range(work.steps)]

    (losses, _) = wire.threads.launch(2, blind)
    assert max(abs(mine - plain) for mine, plain in zip(losses, expected.losses, strict=True)) > 1e-4


def noisy() -> Net:
    """Numbers of torch's own inside of two blocks."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(0.1, 0.9)) for _ in range(2)))
    return Net(lambda net, x: net.blocks(x), blocks=blocks)


def test_recomputation_repeats_torchs_own_numbers() -> None:
    """The gradient of a recomputed block is that of the numbers which its forward drew."""
    torch.manual_seed(0)
    work = work_of(noisy())

    def outcome(recompute: str) -> Any:
        torch.manual_seed(7)
        plan = {"placement": {"precision": "fp64", "recompute": recompute}}
        with pytest.warns(UserWarning, match="not exact"):
            return wire.threads.launch(1, rank, work, plan)[0]

    kept, again = outcome("none"), outcome("full")
    assert kept.losses == again.losses
    for name, gradient in kept.gradients.items():
        assert torch.equal(gradient, again.gradients[name])


class Experts(nn.Module):
    """A mixture whose experts get the tokens that their values send them, and drop out; one without tokens rests."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (mine,) = torch.where(chosen == number)
            if len(mine):
                result = result.index_add(0, mine, expert(tokens[mine]) * weight[mine, None])
        return x + result.view_as(x)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("data", [1, 2])
def test_experts_that_drop_out_train_and_are_named(data: int, seed: int) -> None:
    """No plan draws their masks alike, so the run says so; recomputed or not, the gradients are those of the masks."""
    torch.manual_seed(seed)
    work = work_of(Net(lambda net, x: net.blocks(x), blocks=nn.Sequential(Experts(), Experts())), rows=4, sequence=5)
    lines = survey(work.model, work.loss, work.batch(0)).inexact
    assert any("rows were rearranged by index in blocks.0" in line for line in lines)
    outcomes = []
    for recompute in ("none", "full"):
        plan = {"placement": {"data": data, "precision": "fp64", "recompute": recompute}}
        with warnings.catch_warnings(), mock.patch.object(warnings, "warn"):
            outcomes.append(on_threads(work, plan)[0])
    assert outcomes[0].losses == outcomes[1].losses
    for name, gradient in outcomes[0].gradients.items():
        assert torch.equal(gradient, outcomes[1].gradients[name])


def placed(net: Net, data: int = 1) -> list[str]:
    """What placing the net warns of, over all ranks."""
    work = work_of(net)

    def one(world: wire.World) -> None:
        parallelize(work.fresh(), work.loss, SGD, {"placement": {"data": data}}, world=world, example=work.batch(0))

    with mock.patch.object(warnings, "warn") as warn:  # catch_warnings does not know of threads
        wire.threads.launch(data, one)
    return [str(call.args[0]) for call in warn.call_args_list]


def test_the_first_rank_warns_of_each_module_once() -> None:
    lines = placed(noisy(), data=2)
    assert lines == [
        f"not exact: blocks.{block}.1 calls rrelu, which draws from torch's own generator: other plans draw other "
        "numbers, and a resumed run does not repeat them"
        for block in (0, 1)
    ]


def test_nobody_is_warned_of_dropout() -> None:
    assert placed(encoder()) == []


# ---------------------------------------------------------------- losses that need gradients


def penalised(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy, and a penalty on the gradient with respect to the embedded tokens."""
    embedded = model.table(batch["tokens"])  # type: ignore[operator]
    logits = model.head(model.body(model, embedded))  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(logits.square().sum(), embedded, create_graph=True)
    counted = batch["targets"] != -100
    total = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100, reduction="sum")
    return total + 0.01 * gradient.square().sum(), counted.sum()


def smooth() -> Net:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2)))
    return Net(lambda net, x: net.blocks(x), blocks=blocks)


@pytest.mark.parametrize(
    "placement",
    [
        {"data": 2},
        {"z": 3, "shard": "optimizer"},
        {"z": 2, "shard": "gradients", "recompute": "full"},
    ],
)
def test_a_loss_that_takes_gradients_itself(placement: dict[str, Any]) -> None:
    torch.manual_seed(0)
    work = Work(disturbed(smooth().double()), loss=penalised, steps=3)
    expected = serial(work)
    for found in on_threads(work, {"placement": {"precision": "fp64", **placement}}):
        assert_equal(found, expected)


def test_a_loss_that_takes_gradients_itself_gathers_weights_once_more() -> None:
    """The numbers are those of one process; the bytes are more than the forecast, which knows one backward."""
    torch.manual_seed(0)
    work = Work(disturbed(smooth().double()), loss=penalised, steps=3)
    expected = serial(work)
    for found in on_threads(work, {"placement": {"precision": "fp64", "z": 2, "shard": "parameters"}}):
        more = {flow: traffic for flow, traffic in found.measured.items() if traffic != found.predicted[flow]}
        assert [(flow.axis, flow.kind) for flow in more] == [("z", "weight")]
        found.measured = found.predicted
        assert_equal(found, expected)


def test_a_loss_that_takes_gradients_itself_is_refused_where_weights_come_and_go() -> None:
    torch.manual_seed(0)

    def to_inputs(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        x = model.table(batch["tokens"]).detach().requires_grad_()  # type: ignore[operator]
        logits = model.head(model.body(model, x))  # type: ignore[operator]
        (gradient,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
        return gradient.square().sum(), 1

    work = Work(disturbed(smooth().double()), loss=to_inputs, steps=1)
    with pytest.raises(RankFailed, match=r"torch.autograd.grad, .*shard: parameters .*shard: gradients keeps"):
        on_threads(work, {"placement": {"precision": "fp64", "z": 2, "shard": "parameters"}})
