"""A checkpoint written on one grid continues on any other, and on none: as if nothing had interrupted the run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.plan import Plan
from fourfold.training import checkpoint
from fourfold.training.boxes import boxes_to_write
from fourfold.training.checkpoint import Box, CheckpointError
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from plain import Outcome, Work, disturbed, gpt, serial, worst
from ranks import Processes

HALF = 2
"""Steps before the checkpoint, and after it."""
ADAMW = OptimizerOptions(name="adamw", lr=0.02, eps=1e-6, weight_decay=0.1, clip=1.0, warmup=2, steps=2 * HALF)
PLACES: dict[str, dict[str, Any]] = {
    "all axes": {"tensor": {"algorithm": "4d", "x": 2, "y": 2, "z": 2}},
    "copies": {"tensor": {"algorithm": "4d", "y": 4}},
    "uneven": {"tensor": {"algorithm": "4d", "x": 3}, "z": 2, "shard": "optimizer"},
    "1d": {"tensor": {"algorithm": "1d", "y": 2}, "data": 2},
    "dense": {},
    "shards": {"z": 3, "shard": "parameters"},
}
Launch = Callable[..., list[Any]]


class Counting(nn.Module):
    """A packed decoder that counts, in a buffer, how often it ran."""

    runs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.plain = gpt(0.2, tied=False)
        self.register_buffer("runs", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.runs[1] += 1
        return self.plain(tokens)


@functools.cache
def _counting() -> nn.Module:
    return Counting()


@functools.cache
def _grouped() -> nn.Module:
    torch.manual_seed(0)
    return disturbed(Grouped().double())


class Grouped(nn.Module):
    """One attention whose queries share two heads of keys and values, between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(37, 14), nn.Linear(14, 37)
        self.query, self.key, self.value = nn.Linear(14, 24), nn.Linear(14, 8), nn.Linear(14, 8)
        self.project = nn.Linear(24, 14)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        heads = (linear(x).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.out(x + self.project(mixed.transpose(1, 2).flatten(-2)))


WORKS = {"packed": _counting, "grouped": _grouped}


def work(name: str) -> Work:
    """A few short rows."""
    return Work(WORKS[name](), rows=4, sequence=5, steps=2 * HALF, options=ADAMW)


def plan(place: str) -> dict[str, Any]:
    return {"placement": {"precision": "fp64", **PLACES[place]}}


@functools.cache
def unbroken(name: str) -> Outcome:
    return serial(work(name))


# ---- one rank


def begin(world: wire.World, name: str, place: str, folder: str) -> list[float]:
    """The first half, and a checkpoint."""
    ours = work(name)
    run = parallelize(ours.fresh(), ours.loss, ours.options, plan(place), world=world, example=ours.batch(0))
    losses = [run.step(ours.batch(step)).loss for step in range(HALF)]
    run.save(folder).wait()
    return losses


def go_on(world: wire.World, name: str, place: str, folder: str, end: str) -> tuple[list[float], dict[str, Tensor]]:
    """The second half, in a model whose own values are all wrong; a checkpoint of the end, and the model's state."""
    ours = work(name)
    model = ours.fresh()
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.fill_(2)
    run = parallelize(model, ours.loss, ours.options, plan(place), world=world, example=ours.batch(0))
    newest = checkpoint.latest(Path(folder))
    assert newest is not None
    run.load(newest)
    losses = [run.step(ours.batch(step)).loss for step in range(HALF, 2 * HALF)]
    run.save(end).wait()
    return losses, {name: value.clone() for name, value in run.model.state_dict().items()}


def size(place: str) -> int:
    return Plan.of(plan(place)).world


def assert_continues(launch: Launch, name: str, source: str, target: str, root: Path) -> None:
    """Save on one grid, go on under another, and compare with the run that was not interrupted."""
    half, whole, expected = str(root / "half"), str(root / "whole"), unbroken(name)
    for losses in launch(size(source), begin, name, source, half):
        close(losses, expected.losses[:HALF])
    for losses, state in launch(size(target), go_on, name, target, half, whole):
        close(losses, expected.losses[HALF:])
        assert worst({key: state[key] for key in expected.weights}, expected.weights) <= 1e-12
        if name == "packed":
            assert state["runs"].tolist() == [0, 2 * HALF, 0]
    assert worst(contents(whole, expected), {**expected.weights, **expected.moments}) <= 1e-12


def contents(folder: str, like: Outcome) -> dict[str, Tensor]:
    """Weights and moments of a checkpoint, whole, by logical name."""
    shapes = {f"model.{name}": value for name, value in like.weights.items()}
    shapes |= {f"optimizer.{name}": value for name, value in like.moments.items()}
    found = {name: torch.zeros_like(value) for name, value in shapes.items()}
    newest = checkpoint.latest(Path(folder))
    assert newest is not None
    checkpoint.load(newest, [Box.whole(name, value) for name, value in found.items()], strict=False)
    return {name.partition(".")[2]: value for name, value in found.items()}


def close(found: list[float], expected: list[float]) -> None:
    assert all(abs(a - b) <= 1e-12 * abs(b) for a, b in zip(found, expected, strict=True)), (found, expected)


# ---- from one grid to another


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("packed", "all axes", "1d"),
        ("packed", "uneven", "all axes"),
        ("packed", "1d", "shards"),
        ("packed", "dense", "uneven"),
        ("grouped", "copies", "all axes"),
        ("grouped", "all axes", "dense"),
        ("grouped", "shards", "copies"),
    ],
)
def test_a_run_goes_on_under_another_grid(name: str, source: str, target: str, tmp_path: Path) -> None:
    assert_continues(wire.threads.launch, name, source, target, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(PLACES, 2)))
def test_every_pair_of_grids(name: str, source: str, target: str, tmp_path: Path) -> None:
    if name == "grouped" or "copies" not in (source, target):  # three heads over four ranks: `test_refused`
        assert_continues(wire.threads.launch, name, source, target, tmp_path)


def test_real_processes(gloo: Processes, tmp_path: Path) -> None:
    assert_continues(gloo, "grouped", "copies", "uneven", tmp_path)


# ---- what is written


@pytest.mark.parametrize(("name", "place"), [("packed", "all axes"), ("grouped", "copies"), ("grouped", "uneven")])
def test_the_ranks_write_every_element_once(name: str, place: str) -> None:
    """Copies of key-value heads, norms over y and biases over x lie on several ranks, and are written by one."""
    ours = work(name)

    def rank(world: wire.World) -> list[Box]:
        run = parallelize(ours.fresh(), ours.loss, ours.options, plan(place), world=world, example=ours.batch(0))
        run.step(ours.batch(0))
        assert run._step is not None
        return boxes_to_write(run._step)

    times: dict[str, Tensor] = {}
    for box in itertools.chain(*wire.threads.launch(size(place), rank)):
        count = times.setdefault(box.name, torch.zeros(box.shape, dtype=torch.int64))
        for dim, (offset, extent) in enumerate(zip(box.offsets, box.tensor.shape, strict=True)):
            count = count.narrow(dim, offset, extent)
        count += 1
    like = unbroken(name)
    assert {f"model.{one}" for one in like.weights} | {f"optimizer.{one}" for one in like.moments} <= times.keys()
    assert all(bool((count == 1).all()) for count in times.values())


# ---- what is refused


def test_a_damaged_checkpoint_and_a_foreign_one_are_refused_on_every_rank(tmp_path: Path) -> None:
    for make in WORKS.values():  # here, in one thread: torch's generator is the whole process'
        make()
    wire.threads.launch(size("copies"), begin, "grouped", "copies", str(tmp_path))
    newest = checkpoint.latest(tmp_path)
    assert newest is not None

    def refused(name: str) -> list[str]:
        ours = work(name)

        def rank(world: wire.World) -> str:
            run = parallelize(ours.fresh(), ours.loss, ours.options, plan("1d"), world=world, example=ours.batch(0))
            before = run.logical_state()
            with pytest.raises(ValueError) as caught:
                run.load(newest)
            if name == "packed":  # found before anything is read; damage may be found by one rank alone
                assert run.number == 0
                assert all(torch.equal(value, before[key]) for key, value in run.logical_state().items())
            return f"{type(caught.value).__name__}: {caught.value}"

        return wire.threads.launch(size("1d"), rank)

    said = refused("packed")
    assert all("does not fit" in one and "plain.blocks" in one for one in said), said
    file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    words = refused("grouped")
    assert any(issubclass(getattr(checkpoint, one.partition(":")[0], ValueError), CheckpointError) for one in words)
    assert all(file.name in one or "says why" in one for one in words)
