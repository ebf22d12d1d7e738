"""A checkpoint of any plan continues under any other: loss, weights and moments equal the uninterrupted run's."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.models import convnet
from fourfold.training import checkpoint
from fourfold.training.checkpoint import Box, CheckpointError
from fourfold.training.losses.classification import classification
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from plain import Outcome, Work, disturbed, gpt, serial, worst
from ranks import Processes

LEVELS = ("none", "optimizer", "parameters")
PLANS = list(itertools.product((1, 2, 3, 4), LEVELS))
"""Ranks and shard level."""
ADAMW = OptimizerOptions(name="adamw", lr=0.02, eps=1e-6, weight_decay=0.1, clip=1.0, warmup=2, steps=6)
"""A key's bias has a gradient of exactly zero, so all of it is rounding, and AdamW divides rounding by `eps`."""
HALF = 3
"""Steps before the checkpoint, and after it."""
TOLERANCE = 1e-12

Plan = tuple[int, str]
Launch = Callable[..., list[Any]]


def settings(plan: Plan, **more: Any) -> dict[str, Any]:
    """Replicas where nothing is cut, shards over z otherwise."""
    ranks, level = plan
    cut = {"data": ranks} if level == "none" else {"z": ranks}
    return {"placement": {**cut, "shard": level, "precision": "fp64", **more}}


# ---- what is trained


def language() -> Work:
    """Dropout on, tied weights, sizes that do not divide."""
    return Work(gpt(0.2), steps=2 * HALF, options=ADAMW)


def untied() -> Work:
    """A head of its own."""
    return replace(language(), model=gpt(0.2, tied=False))


def frozen() -> Work:
    """As under LoRA: most weights have no optimizer state."""
    return replace(language(), prepare=_freeze)


def single() -> Work:
    """In float32, as plans of mixed precision want it."""
    return replace(language(), model=gpt(0.2, dtype=torch.float32))


def scalar() -> Work:
    """A weight without dims, of which only one rank holds anything."""
    return replace(language(), model=_scaled())


def few_rows() -> Work:
    """Weights with fewer rows than ranks, which are cut along other dims."""
    return replace(language(), model=_shifted())


def images() -> Work:
    """A convnet with buffers."""
    return Pictures(_normalised(), steps=2 * HALF, options=ADAMW, loss=classification)


WORKS: dict[str, Callable[[], Work]] = {
    work.__name__: work for work in (language, untied, frozen, scalar, few_rows, images)
}


@functools.cache
def _scaled() -> nn.Module:
    return Scaled().double()


@functools.cache
def _shifted() -> nn.Module:
    torch.manual_seed(0)
    return disturbed(Shifted().double())


@functools.cache
def _normalised() -> nn.Module:
    torch.manual_seed(0)  # here, in one thread before any rank runs: torch's generator is the whole process'
    return disturbed(Normalised().double())


def _freeze(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("contract.weight", "contract.bias", "norm.weight")))


class Scaled(nn.Module):
    """Logits times a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = copy.deepcopy(gpt(0.2))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.plain(tokens) * self.scale


class Shifted(nn.Module):
    """Logits beside learned ones, as vision transformers add positions of shape [1, tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = copy.deepcopy(gpt(0.2))
        self.positions = nn.Parameter(torch.zeros(1, 12, 37))
        self.pair = nn.Parameter(torch.zeros(2, 3, 37))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.plain(tokens) + self.positions + self.pair.sum((0, 1))


class Normalised(nn.Module):
    """A convnet that takes the mean off and divides by the spread that its buffers hold."""

    mean: Tensor
    spread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet.ConvNet(convnet.Config(classes=5, width=8, blocks=2, groups=2))
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1))
        self.register_buffer("spread", torch.tensor(0.7))

    def forward(self, images: Tensor) -> Tensor:
        return self.net((images - self.mean) / self.spread)


@dataclass(frozen=True)
class Pictures(Work):
    """Random images of 6 × 6 pixels and their classes."""

    def batch(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        images = torch.randn(self.rows, 3, 6, 6, generator=generator, dtype=torch.float64)
        return {"inputs": images, "targets": torch.randint(5, (self.rows,), generator=generator)}


# ---- one rank


def begin(world: wire.World, name: str, plan: Mapping[str, Any], folder: str) -> list[float]:
    """The first half, and a checkpoint."""
    work = WORKS[name]()
    run = parallelize(work.fresh(), work.loss, work.options, plan, world=world, example=work.batch(0))
    losses = [run.step(work.batch(step)).loss for step in range(HALF)]
    run.save(folder).wait()
    return losses


def go_on(world: wire.World, name: str, plan: Mapping[str, Any], path: str, folder: str) -> list[float]:
    """The second half from a checkpoint, in a model whose own values are all wrong; and a checkpoint of the end."""
    work = WORKS[name]()
    model = work.fresh()
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.fill_(0.5)
    run = parallelize(model, work.loss, work.options, plan, world=world, example=work.batch(0))
    run.load(path)
    assert run.number == HALF
    losses = [run.step(work.batch(step)).loss for step in range(HALF, 2 * HALF)]
    run.save(folder).wait()
    return losses


# ---- from one plan to another


def assert_continues(launch: Launch, name: str, source: Plan, target: Plan, expected: Outcome, root: Path) -> None:
    """Save under `source`, go on under `target`, and compare the end with the uninterrupted run's."""
    started = launch(source[0], begin, name, settings(source), str(root / "half"))
    assert_resumes(launch, name, started, target, expected, root / "half", root / "whole")


def assert_resumes(
    launch: Launch, name: str, started: list[list[float]], target: Plan, expected: Outcome, half: Path, whole: Path
) -> None:
    """Go on from the newest checkpoint of `half` under `target`."""
    path = checkpoint.latest(half)
    assert path is not None
    finished = launch(target[0], go_on, name, settings(target), str(path), str(whole))
    for losses in started:
        close(losses, expected.losses[:HALF])
    for losses in finished:
        close(losses, expected.losses[HALF:])
    end = checkpoint.latest(whole)
    assert end is not None
    found = contents(end, expected)
    assert worst(found, {**expected.weights, **expected.moments}) <= TOLERANCE


def contents(path: Path, like: Outcome) -> dict[str, Tensor]:
    """Weights and optimizer state that a checkpoint holds, whole, by logical name."""
    names = {f"model.{name}": name for name in like.weights} | {f"optimizer.{name}": name for name in like.moments}
    found = {name: torch.zeros_like({**like.weights, **like.moments}[name]) for name in names.values()}
    boxes = [Box.whole(saved, found[name]) for saved, name in names.items()]
    state = checkpoint.load(path, boxes, strict=False)
    assert state["optimizer"]["step"] == state["number"] == 2 * HALF
    return found


def close(found: list[float], expected: list[float]) -> None:
    for mine, plain in zip(found, expected, strict=True):
        assert abs(mine - plain) <= TOLERANCE * abs(plain), (found, expected)


@pytest.fixture(scope="module")
def uninterrupted() -> Callable[[str], Outcome]:
    """The plain process' six steps, once for each kind of work."""
    kept: dict[str, Outcome] = {}

    def outcome(name: str) -> Outcome:
        if name not in kept:
            kept[name] = serial(WORKS[name]())
        return kept[name]

    return outcome


ROUND = [(source, PLANS[(index + 5) % len(PLANS)]) for index, source in enumerate(PLANS)]
"""Each of the twelve plans once as source and once as target, always to other ranks and another level."""


@pytest.mark.parametrize(("source", "target"), ROUND, ids=str)
def test_real_processes(
    source: Plan, target: Plan, gloo: Processes, uninterrupted: Callable[[str], Outcome], tmp_path: Path
) -> None:
    assert_continues(gloo, "language", source, target, uninterrupted("language"), tmp_path)


def test_the_round_covers_every_plan_both_ways() -> None:
    assert {source for source, _ in ROUND} == {target for _, target in ROUND} == set(PLANS)
    assert all(source[0] != target[0] and source[1] != target[1] for source, target in ROUND)


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("untied", (3, "parameters"), (2, "none")),
        ("frozen", (2, "optimizer"), (3, "parameters")),
        ("frozen", (4, "parameters"), (1, "none")),
        ("scalar", (3, "parameters"), (4, "optimizer")),
        ("scalar", (2, "none"), (3, "parameters")),
        ("few_rows", (4, "parameters"), (3, "optimizer")),
        ("few_rows", (2, "optimizer"), (4, "parameters")),
        ("images", (3, "parameters"), (2, "optimizer")),
        ("images", (1, "none"), (4, "parameters")),
    ],
    ids=str,
)
def test_other_models(
    name: str, source: Plan, target: Plan, uninterrupted: Callable[[str], Outcome], tmp_path: Path
) -> None:
    assert_continues(wire.threads.launch, name, source, target, uninterrupted(name), tmp_path)


def test_more_ranks_than_rows(uninterrupted: Callable[[str], Outcome], tmp_path: Path) -> None:
    """Norms and biases of 12 rows on 13 ranks."""
    assert_continues(
        wire.threads.launch, "language", (13, "parameters"), (2, "optimizer"), uninterrupted("language"), tmp_path / "a"
    )
    assert_continues(
        wire.threads.launch, "language", (3, "optimizer"), (13, "parameters"), uninterrupted("language"), tmp_path / "b"
    )


def test_shards_and_replicas_together(uninterrupted: Callable[[str], Outcome], tmp_path: Path) -> None:
    """Of several replicas one writes; all read."""
    both = {"placement": {"z": 2, "data": 2, "shard": "parameters", "precision": "fp64"}}
    started = wire.threads.launch(4, begin, "language", both, str(tmp_path / "half"))
    assert_resumes(
        wire.threads.launch,
        "language",
        started,
        (3, "optimizer"),
        uninterrupted("language"),
        tmp_path / "half",
        tmp_path / "whole",
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Plan], tuple[list[list[float]], Path]]:
    """The first half under each plan, once."""
    kept: dict[Plan, tuple[list[list[float]], Path]] = {}

    def half(plan: Plan) -> tuple[list[list[float]], Path]:
        if plan not in kept:
            folder = tmp_path_factory.mktemp("half")
            kept[plan] = wire.threads.launch(plan[0], begin, "language", settings(plan), str(folder)), folder
        return kept[plan]

    return half


@pytest.mark.long
@pytest.mark.parametrize(("source", "target"), list(itertools.product(PLANS, PLANS)), ids=str)
def test_every_pair(
    source: Plan,
    target: Plan,
    saved: Callable[[Plan], tuple[list[list[float]], Path]],
    uninterrupted: Callable[[str], Outcome],
    tmp_path: Path,
) -> None:
    started, folder = saved(source)
    assert_resumes(wire.threads.launch, "language", started, target, uninterrupted("language"), folder, tmp_path)


# ---- precision, seeds, other models


def test_a_plan_of_mixed_precision_hands_over_its_fp32_masters(tmp_path: Path) -> None:
    """What bf16 rounds for its own use is not what is saved: the masters arrive bit for bit in a plan of fp32."""
    work = single()

    def first(world: wire.World) -> dict[str, Tensor]:
        plan = settings((3, "parameters"), precision="bf16")
        run = parallelize(work.fresh(), work.loss, work.options, plan, world=world, example=work.batch(0))
        for step in range(HALF):
            run.step(work.batch(step))
        run.save(tmp_path).wait()
        return run.logical_state()

    masters = wire.threads.launch(3, first)[0]
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in masters.values())

    def then(world: wire.World) -> tuple[dict[str, Tensor], list[float]]:
        plan = settings((world.size, "optimizer"), precision="fp32")
        run = parallelize(work.fresh(), work.loss, work.options, plan, world=world, example=work.batch(0))
        newest = checkpoint.latest(tmp_path)
        assert newest is not None
        run.load(newest)
        weights = run.logical_state()
        return weights, [run.step(work.batch(step)).loss for step in range(HALF, 2 * HALF)]

    alone, pair = wire.threads.launch(1, then)[0], wire.threads.launch(2, then)[0]
    for name, master in masters.items():
        assert torch.equal(alone[0][name], master)
        assert torch.equal(pair[0][name], master)
    torch.testing.assert_close(pair[1], alone[1], rtol=1e-5, atol=0)


def test_a_checkpoint_of_another_model_seed_or_optimizer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    wire.threads.launch(1, begin, "language", settings((1, "none")), str(tmp_path))
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    work = language()

    def refused(changed: Work, seed: int, words: str) -> None:
        plan = settings((1, "none"))
        run = parallelize(changed.fresh(), changed.loss, changed.options, plan, seed=seed, example=changed.batch(0))
        before = run.logical_state()
        with pytest.raises(ValueError, match=words):
            run.load(newest)
        assert run.number == 0
        assert all(torch.equal(before[name], weight) for name, weight in run.logical_state().items())

    refused(untied(), 1, "head.weight")
    refused(work, 2, "written with seed 1, this run has seed 2")
    refused(replace(work, options=replace(ADAMW, name="sgd", momentum=0.9)), 1, "momentum_buffer")
    with pytest.raises(CheckpointError):
        parallelize(work.fresh(), work.loss, work.options, example=work.batch(0)).load(tmp_path / "step-00000099")
