"""Batch norm on several ranks against one process that takes the same micro-batches, running statistics included."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold import wire
from fourfold.placement.batch_norm import Scope, synchronise
from fourfold.placement.refusals import PlacementError
from fourfold.placement.rows import split
from fourfold.training.batch import batch_of
from fourfold.training.optimizer import OptimizerOptions, build_plain
from fourfold.training.run import Run, parallelize
from plain import worst

OPTIONS = OptimizerOptions(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.01, clip=5.0)
CLASSES = 5


class Block(nn.Module):
    """Two convolutions with batch norm, added to the input (He et al., 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """A stem, two blocks, a head; its first norm reads the images themselves, so that nothing is learned before it."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.normal = nn.BatchNorm2d(3)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.bottom: nn.Module = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(self.normal(images))
        for block in self.blocks:
            x = block(x)
        return self.head(self.bottom(x.mean((2, 3))))


def resnet(dtype: torch.dtype = torch.float64) -> ResNet:
    torch.manual_seed(0)
    return ResNet().to(dtype)


def classified(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch["images"]), batch["labels"], reduction="sum"), len(batch["labels"])


@dataclass
class Work:
    model: nn.Module
    rows: int = 10
    steps: int = 20
    shift: float = 0.3
    options: OptimizerOptions = OPTIONS
    dtype: torch.dtype = torch.float64
    shape: tuple[int, ...] = (3, 4, 4)

    def batch(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(self.rows, *self.shape, generator=generator, dtype=torch.float64) + self.shift
        labels = torch.randint(CLASSES, (self.rows,), generator=generator)
        return {"images": images.to(self.dtype), "labels": labels}


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    evaluated: float = 0.0
    forecast: Any = None
    measured: list[Any] = field(default_factory=list)


def serial(work: Work, microbatches: int = 1) -> Outcome:
    """Plain PyTorch: gradients of micro-batches add up, and each takes its own statistics."""
    model, outcome = copy.deepcopy(work.model), Outcome()
    optimizer = build_plain(work.options, model.named_parameters())
    for step in range(work.steps):
        optimizer.zero_grad()
        batch, total, count = work.batch(step), 0.0, 0
        for number in range(microbatches):
            rows = split(range(work.rows), microbatches, number)
            value, counted = classified(model, {k: v[rows.start : rows.stop] for k, v in batch.items()})
            value.backward()
            total, count = total + float(value.detach()), count + counted
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            assert parameter.grad is not None
            parameter.grad /= count
        if work.options.clip is not None:
            nn.utils.clip_grad_norm_(trained, work.options.clip)
        optimizer.step(optimizer.rate(step))
        outcome.losses.append(total / count)
    outcome.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    outcome.gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    outcome.buffers = dict(model.named_buffers())
    model.eval()
    value, count = classified(model, work.batch(99))
    outcome.evaluated = float(value.detach()) / count
    return outcome


def gathered(run: Run, outcome: Outcome) -> Outcome:
    outcome.weights, outcome.gradients = run.logical_state(), run.logical_gradients()
    outcome.buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    return outcome


def rank(world: wire.World, work: Work, plan: dict[str, Any]) -> Outcome:
    run = parallelize(copy.deepcopy(work.model), classified, work.options, plan, world=world)
    outcome = Outcome()
    for step in range(work.steps):
        outcome.losses.append(run.step(work.batch(step)).loss)
        outcome.measured.append(run.ledger.traffic(step))
    outcome.forecast = run.forecast().traffic()
    gathered(run, outcome)
    outcome.evaluated = run.evaluate([batch_of(work.batch(99))])
    return outcome


def on_threads(work: Work, placement: dict[str, Any], microbatches: int = 1) -> list[Outcome]:
    placement = {"precision": "fp64", **placement}
    plan = {"placement": placement, "schedule": {"name": "accumulate", "microbatches": microbatches}}
    return wire.threads.launch(placement.get("z", 1) * placement.get("data", 1), rank, work, plan, timeout=60)


def assert_equal(found: Outcome, expected: Outcome, tolerance: float = 1e-12) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.evaluated == pytest.approx(expected.evaluated, rel=tolerance)
    assert worst(found.weights, expected.weights) <= tolerance
    assert worst(found.gradients, expected.gradients) <= tolerance
    assert not expected.buffers or worst(found.buffers, expected.buffers) <= tolerance
    assert found.buffers.keys() == expected.buffers.keys()
    assert all(step == found.forecast for step in found.measured), (found.measured[0], found.forecast)


RANKS = [
    {"data": 1},
    {"data": 2},
    {"data": 3},
    {"z": 3, "shard": "parameters"},
    {"z": 2, "data": 2, "shard": "parameters"},
]


@pytest.mark.parametrize(
    ("placement", "microbatches"),
    [
        *((placement, 2) for placement in RANKS),
        (RANKS[2], 1),
        *(pytest.param(placement, 1, marks=pytest.mark.long) for placement in RANKS if placement != RANKS[2]),
    ],
    ids=str,
)
def test_twenty_steps_equal_serial(placement: dict[str, Any], microbatches: int) -> None:
    work = Work(resnet())
    expected = serial(work, microbatches)
    for found in on_threads(work, placement, microbatches):
        assert_equal(found, expected)


@pytest.mark.parametrize("placement", [*RANKS, {"z": 2, "shard": "optimizer"}], ids=str)
def test_computed_twice_it_moves_its_running_statistics_once(placement: dict[str, Any]) -> None:
    work = Work(resnet(), steps=3)
    expected = serial(work, 2)
    for found in on_threads(work, {**placement, "recompute": "full"}, 2):
        assert_equal(found, expected)


def test_a_frozen_block_that_backward_does_not_reach_is_not_computed_twice() -> None:
    model = resnet()
    for frozen in (model.normal, model.stem, model.blocks[0]):
        frozen.requires_grad_(False)
    work = Work(model, steps=2)
    expected = serial(work)
    for found in on_threads(work, {"data": 2, "recompute": "full"}):
        assert_equal(found, expected)


@pytest.mark.parametrize("rows", [2, 3])
def test_rows_that_do_not_count_enter_no_statistics(rows: int) -> None:
    """Fewer rows than ranks: the others compute one that must not be seen, neither in forward nor in backward."""
    model = resnet()
    model.bottom = nn.Identity()  # of two values it makes −1 and 1, and their gradient is rounding
    work = Work(model, rows=rows, steps=4)
    expected = serial(work)
    for placement in ({"data": 4}, {"z": 4, "shard": "parameters", "recompute": "full"}):
        for found in on_threads(work, placement):
            assert_equal(found, expected)


def single(norm: nn.Module) -> nn.Module:
    """A convolution, the norm, a head."""
    torch.manual_seed(1)
    stem = nn.Conv2d(3, 4, 3, padding=1)
    return nn.Sequential(stem, norm, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)).double()


class Activated(nn.BatchNorm2d):
    """A batch norm with a forward of its own, as image models like to have."""

    def forward(self, input: Tensor) -> Tensor:
        return F.elu(super().forward(input)) + 1


NORMS = {
    "cumulative average": lambda: nn.BatchNorm2d(4, momentum=None),
    "another momentum and epsilon": lambda: nn.BatchNorm2d(4, momentum=0.7, eps=0.1),
    "no running statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "no weights": lambda: nn.BatchNorm2d(4, affine=False),
    "torch's own synchronisation": lambda: nn.SyncBatchNorm(4),
    "a subclass": lambda: Activated(4),
    "frozen weights": lambda: nn.BatchNorm2d(4).requires_grad_(False),
    "called twice": lambda: nn.Sequential(*[nn.BatchNorm2d(4)] * 2),
}


@pytest.mark.parametrize("name", NORMS)
def test_every_kind_of_batch_norm(name: str) -> None:
    work = Work(single(NORMS[name]()), rows=7, steps=4)
    expected = serial(work, 2)
    for found in on_threads(work, {"data": 3}, 2):
        assert_equal(found, expected)


def test_a_lazy_one_that_has_seen_a_batch() -> None:
    model = single(nn.LazyBatchNorm2d())
    model(Work(model).batch(0)["images"])
    expected = serial(Work(model, steps=3))
    for found in on_threads(Work(model, steps=3), {"z": 2, "shard": "gradients"}):
        assert_equal(found, expected)


def test_volumes() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4), nn.Flatten(), nn.LazyLinear(CLASSES)).double()
    work = Work(model, rows=5, steps=3, shape=(3, 2, 3, 2))
    model(work.batch(0)["images"])
    expected = serial(work)
    for found in on_threads(work, {"data": 2}):
        assert_equal(found, expected)


@pytest.mark.parametrize("shift", [1e2, -1e4])
def test_a_mean_far_from_zero_loses_no_digits(shift: float) -> None:
    """The variance is 1; the squares of the values are 1e4 and 1e8 times as large."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, CLASSES)).double()
    work = Work(model, rows=7, steps=1, shift=shift, options=OptimizerOptions(name="sgd", lr=0.1))
    expected = serial(work)
    for found in on_threads(work, {"data": 3}):
        # One rounding of the mean is |shift| x 2^-53 of the variance's root, in serial as well.
        assert_equal(found, expected, 1e-12 * max(1.0, abs(shift) / 1e3))


@pytest.mark.parametrize("frozen", ["normal", "blocks.0", "bottom"])
def test_what_is_frozen_stays_so_also_after_an_evaluation(frozen: str) -> None:
    model = resnet()
    model.get_submodule(frozen).eval()
    work = Work(model, steps=3)
    expected = serial(work)

    def body(world: wire.World) -> Outcome:
        plan = {"placement": {"data": 2, "precision": "fp64"}}
        run = parallelize(copy.deepcopy(model), classified, OPTIONS, plan, world=world)
        outcome = Outcome()
        for step in range(work.steps):
            outcome.losses.append(run.step(work.batch(step)).loss)
            outcome.measured.append(run.ledger.traffic(step))
            outcome.evaluated = run.evaluate([batch_of(work.batch(99))])
        outcome.forecast = run.forecast().traffic()
        return gathered(run, outcome)

    for found in wire.threads.launch(2, body, timeout=60):
        assert_equal(found, expected)
        for name, buffer in model.get_submodule(frozen).named_buffers(frozen):
            assert torch.equal(found.buffers[name], buffer)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_narrow_types_take_statistics_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    """Against float64 of the same inputs; one layer, so that only its own roundings are seen."""
    torch.manual_seed(3)
    x = (torch.randn(9, 4, 3, 3) * 2 + 5).to(dtype)
    toward = torch.randn(9, 4, 3, 3).to(dtype)
    plain = nn.BatchNorm2d(4).double()
    nn.init.normal_(plain.weight)
    wide = x.double().requires_grad_()
    expected = plain(wide)
    expected.backward(toward.double())

    def body(world: wire.World) -> Any:
        module = nn.BatchNorm2d(4)
        module.load_state_dict(state)
        axis = wire.Mesh(world, {"data": 2}).over("z", "data")
        synchronise(module, lambda: Scope(axis, lambda: False))
        rows = slice(0, 4) if world.rank == 0 else slice(4, 9)
        mine = x[rows].clone().requires_grad_()
        result = module(mine)
        result.backward(toward[rows])
        return result.detach(), mine.grad, module

    state = nn.BatchNorm2d(4).state_dict() | {"weight": plain.weight.detach().float()}
    (first, grad1, one), (second, grad2, two) = wire.threads.launch(2, body)
    assert first.dtype == grad1.dtype == dtype
    assert one.running_mean.dtype == torch.float32
    assert wide.grad is not None and plain.running_var is not None and plain.weight.grad is not None
    for found, wanted in ((torch.cat([first, second]), expected.detach()), (torch.cat([grad1, grad2]), wide.grad)):
        assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max())
    for module in (one, two):
        assert torch.allclose(module.running_var.double(), plain.running_var, rtol=1e-6)  # of the very inputs
    summed = one.weight.grad + two.weight.grad
    assert torch.allclose(summed.double(), plain.weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_in_bf16(ranks: int) -> None:
    """Weights and inputs in bf16 where the machine computes in it, statistics in float32; evaluation too."""
    work = Work(resnet(torch.float32), dtype=torch.float32)

    def loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        images = batch["images"].to(model.head.weight.dtype)
        return classified(lambda _: model(images).float(), batch)  # type: ignore[arg-type]

    def body(world: wire.World) -> list[float]:
        plan = {"placement": {"data": ranks, "precision": "bf16"}}
        run = parallelize(copy.deepcopy(work.model), loss, OPTIONS, plan, world=world)
        losses = [run.step(work.batch(step)).loss for step in range(2)]
        assert all(buffer.dtype in (torch.float32, torch.int64) for buffer in run.model.buffers())
        return [*losses, run.evaluate([batch_of(work.batch(9))])]

    plain = parallelize(copy.deepcopy(work.model), classified, OPTIONS, world=wire.join())
    expected = [plain.step(work.batch(step)).loss for step in range(2)] + [plain.evaluate([batch_of(work.batch(9))])]
    assert wire.threads.launch(ranks, body)[0] == pytest.approx(expected, rel=0.05)


def test_a_compiled_layer_has_no_break_and_the_same_numbers() -> None:
    def body(world: wire.World, compiled: bool) -> Any:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh()).double()
        axis = wire.Mesh(world, {"data": 1}).over("z", "data")
        synchronise(model, lambda: Scope(axis, lambda: False))
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        x = torch.randn(5, 3, 6, 6, dtype=torch.float64)
        call(x).square().sum().backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    plain, compiled = (wire.threads.launch(1, body, flag)[0] for flag in (False, True))
    for mine, theirs in zip(compiled, plain, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-13, atol=1e-13)


def test_a_checkpoint_of_two_ranks_goes_on_on_three(tmp_path: Path) -> None:
    work = Work(resnet(), steps=6)
    expected = serial(work)

    def body(world: wire.World, placement: dict[str, Any], steps: range) -> Outcome:
        plan = {"placement": {"precision": "fp64", **placement}}
        run = parallelize(copy.deepcopy(work.model), classified, OPTIONS, plan, world=world, example=work.batch(0))
        if steps.start:
            run.load(tmp_path / f"step-{steps.start}")
        outcome = Outcome()
        for step in steps:
            outcome.losses.append(run.step(work.batch(step)).loss)
        run.save(tmp_path)
        run.wait()
        return gathered(run, outcome)

    first = wire.threads.launch(2, body, {"z": 2, "shard": "parameters"}, range(3))[0]
    (saved,) = tmp_path.iterdir()
    saved.rename(tmp_path / "step-3")
    for found in wire.threads.launch(3, body, {"data": 3}, range(3, 6)):
        assert first.losses + found.losses == pytest.approx(expected.losses, rel=1e-12)
        assert worst(found.weights, expected.weights) <= 1e-12
        assert worst(found.buffers, expected.buffers) <= 1e-12


class Functional(nn.Module):
    """Asks for the statistics of a batch by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class ByHand(nn.BatchNorm2d):
    """Takes statistics in a way that nobody can see."""

    def forward(self, input: Tensor) -> Tensor:
        return input - input.mean((0, 2, 3), keepdim=True)


@pytest.mark.parametrize(
    ("norm", "match"),
    [(Functional(), "^.*1 calls F.batch_norm itself"), (ByHand(4), "1 is a ByHand that does not call F.batch_norm")],
)
def test_statistics_that_nobody_can_take_over_all_ranks_are_refused_by_name(norm: nn.Module, match: str) -> None:
    with pytest.raises(wire.RankFailed, match=match) as caught:
        on_threads(Work(single(norm), steps=1), {"data": 2})
    assert isinstance(caught.value.__cause__, PlacementError)
    on_threads(Work(single(norm), steps=1), {})  # one rank has the whole micro-batch


def test_a_single_value_is_refused_as_torch_refuses_it() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double()
    with pytest.raises(wire.RankFailed, match="more than one value a channel in a micro-batch, found 1"):
        on_threads(Work(model, rows=1, steps=1), {"data": 2})
    for found in on_threads(Work(model, rows=2, steps=1), {"data": 2}):  # one a rank is enough
        assert_equal(found, serial(Work(model, rows=2, steps=1)))


def _on_gloo(world: wire.World) -> dict[str, Any]:
    placement = {"z": 2, "shard": "parameters", "precision": "fp64", "recompute": "full"}
    return vars(rank(world, Work(resnet(), steps=3), {"placement": placement}))


def test_real_processes(gloo: Any) -> None:
    expected = serial(Work(resnet(), steps=3))
    for found in gloo(2, _on_gloo):
        assert_equal(Outcome(**found), expected)


def test_a_model_without_batch_norm_is_left_alone() -> None:
    template = nn.Sequential(nn.Flatten(), nn.Linear(48, CLASSES)).double()

    def body(world: wire.World) -> bool:
        model = copy.deepcopy(template)
        plan = {"placement": {"data": 2, "precision": "fp64"}}
        run = parallelize(model, classified, OPTIONS, plan, world=world, example=Work(model).batch(0))
        return run.placed.statistics is None and all("forward" not in vars(module) for module in model)

    assert wire.threads.launch(2, body) == [True, True]
