"""A run's own calls: what one rank cannot do, no rank does; and what cannot be is refused in words."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.training import checkpoint
from fourfold.training.batch import BatchError, Held
from fourfold.training.checkpoint.coordination import Job
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import Run, RunError, parallelize
from fourfold.training.values import ValuesError
from plain import SGD, Work, gpt, worst

PLANS = [{"data": 2}, {"z": 2, "shard": "parameters"}]


WORK = Work(gpt())


def placed(world: wire.World, placement: dict, work: Work = WORK) -> tuple[Run, Work]:
    plan = {"placement": {**placement, "precision": "fp64"}}
    return parallelize(work.fresh(), work.loss, SGD, plan, world=world, example=work.batch(0)), work


# ---- checkpoints


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("placement", PLANS)
def test_what_is_saved_is_there_on_every_rank_after_wait(
    placement: dict, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Job.run

    def late(job: Job) -> None:
        time.sleep(0.2)
        write(job)

    monkeypatch.setattr(Job, "run", late)

    def body(world: wire.World) -> list[int]:
        run, work = placed(world, placement)
        steps = []
        for step in range(2):
            run.step(work.batch(step))
            run.save(tmp_path, asynchronous=asynchronous)
            if asynchronous:
                run.wait()
            newest = checkpoint.latest(tmp_path)
            assert newest is not None
            run.load(newest)
            steps.append(run.number)
        return steps

    assert wire.threads.launch(2, body) == [[1, 2], [1, 2]]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_on_one_rank_fails_on_all(
    failing: int, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = threading.Event()
    broken.set()
    write = Job.run

    def run_or_fail(job: Job) -> None:
        if broken.is_set() and job.rank == failing:
            raise checkpoint.DiskFull("no room")
        if not broken.is_set():
            write(job)

    monkeypatch.setattr(Job, "run", run_or_fail)

    def body(world: wire.World) -> None:
        run, _ = placed(world, PLANS[1])
        expected, words = (
            (checkpoint.DiskFull, "no room") if world.rank == failing else (RunError, f"rank {failing} failed")
        )
        with pytest.raises(expected, match=words):
            run.save(tmp_path, asynchronous=asynchronous)
            run.wait()
        run.mesh["z"].barrier()
        broken.clear()
        run.save(tmp_path)
        assert [path.name for path in tmp_path.iterdir() if path.suffix != ".part"] == ["step-00000000"]

    wire.threads.launch(2, body)


def test_an_extra_that_cannot_be_written_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    def body(world: wire.World) -> None:
        run, _ = placed(world, PLANS[1])
        expected = RunError if world.rank else checkpoint.CheckpointError
        with pytest.raises(expected):
            run.save(tmp_path, extra=None if world.rank else (1, 2))
        assert checkpoint.latest(tmp_path) is None

    wire.threads.launch(2, body)


@pytest.mark.parametrize("placement", PLANS)
def test_ranks_that_read_different_steps_load_nothing(placement: dict, tmp_path: Path) -> None:
    def body(world: wire.World) -> None:
        run, work = placed(world, placement)
        paths = []
        for step in range(2):
            run.step(work.batch(step))
            paths.append(run.save(tmp_path).path)
        run.step(work.batch(2))
        before = run.logical_state()
        with pytest.raises(RunError, match="step 2 on rank 0, step 1 on rank 1; nothing was loaded"):
            run.load(paths[1 - world.rank])
        with pytest.raises(RunError if world.rank == 0 else checkpoint.CheckpointError, match=r"rank 1 failed|nowhere"):
            run.load(paths[0] if world.rank == 0 else tmp_path / "nowhere")
        assert run.number == 3
        assert worst(run.logical_state(), before) == 0

    wire.threads.launch(2, body)


# ---- the start


@pytest.mark.parametrize(
    "buffer", [torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros((), dtype=torch.bool)]
)
def test_buffers_that_differ_between_ranks_are_refused(buffer: Tensor) -> None:
    def body(world: wire.World) -> None:
        model = WORK.fresh()
        model.register_buffer("table", buffer + (world.rank == 1))
        with pytest.raises(ValuesError, match="rank 1 holds other values of 'table' than rank 0"):
            parallelize(model, WORK.loss, SGD, {"placement": {"data": 2}}, world=world, example=WORK.batch(0))

    wire.threads.launch(2, body)


# ---- gradients


@pytest.mark.parametrize("placement", PLANS)
def test_zero_grad_between_steps_changes_nothing(placement: dict) -> None:
    def body(world: wire.World, zero: bool) -> dict[str, Tensor]:
        run, work = placed(world, placement)
        for step in range(2):
            run.step(work.batch(step))
            if zero:
                run.optimizer.zero_grad()
                assert not any(gradient.any() for gradient in run.logical_gradients().values())
        return run.logical_state()

    left, emptied = (wire.threads.launch(2, body, zero)[0] for zero in (False, True))
    assert worst(emptied, left) == 0


@pytest.mark.parametrize("placement", [{"data": 2}, *PLANS[1:], {"z": 2, "shard": "optimizer"}])
def test_weights_that_are_not_finite_are_not_saved(placement: dict, tmp_path: Path) -> None:
    """A loss that is finite, with a gradient that is not: the square root's at zero."""
    name = "blocks.1.mlp.expand.weight"

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | int]:
        total, count = WORK.loss(model, batch)
        zero = (model.get_parameter(name) * 0).sum()
        return total + (zero.sqrt() if batch["tokens"][0, 0] == 1 else zero), count

    options = OptimizerOptions("sgd", lr=0.1)

    def body(world: wire.World) -> list[str]:
        plan = {"placement": {**placement, "precision": "fp64"}}
        run = parallelize(WORK.fresh(), loss, options, plan, world=world, example=WORK.batch(0))
        run.step(WORK.batch(0))
        run.save(tmp_path)
        poisoned = WORK.batch(1)
        poisoned["tokens"][:, 0] = 1
        run.step(poisoned)
        assert not run.logical_state()[name].isfinite().all()
        with pytest.raises(RunError) as caught:
            run.save(tmp_path)
        newest = checkpoint.latest(tmp_path)
        assert newest is not None
        run.load(newest)
        assert all(weight.isfinite().all() for weight in run.logical_state().values())
        return [str(caught.value), newest.name]

    for said, newest in wire.threads.launch(2, body):
        assert said.startswith(f"checkpoint of step 2: expected finite weights, found NaN or infinity in '{name}'")
        assert newest == "step-00000001"


def test_a_weight_that_is_not_finite_on_one_rank_is_named_there_and_saved_by_none(tmp_path: Path) -> None:
    def body(world: wire.World) -> None:
        run, _ = placed(world, PLANS[1])
        if world.rank == 1:
            run.placed.shards[0].parameter.data[-1] = float("inf")
        with pytest.raises(RunError, match="rank 1 failed" if world.rank == 0 else "checkpoint of step 0: .* in '"):
            run.save(tmp_path)
        assert not list(tmp_path.iterdir())

    wire.threads.launch(2, body)


# ---- evaluation


def test_evaluate_takes_mappings_and_divides_by_counts_below_one() -> None:
    def tenth(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | int]:
        total, count = WORK.loss(model, batch)
        return total / 1000, torch.as_tensor(count, dtype=torch.float64) / 1000

    def body(world: wire.World) -> list[float]:
        plan = {"placement": {"data": world.size, "precision": "fp64"}}
        run = parallelize(WORK.fresh(), tenth, SGD, plan, world=world, example=WORK.batch(0))
        return [run.evaluate([WORK.batch(3), Held(WORK.batch(4))]), run.evaluate([Held(WORK.batch(3))])]

    expected = []
    for steps in ([3, 4], [3]):
        pairs = [WORK.loss(WORK.fresh().eval(), WORK.batch(step)) for step in steps]
        expected.append(sum(float(total.detach()) for total, _ in pairs) / sum(float(count) for _, count in pairs))
    for ranks in (1, 2):
        assert wire.threads.launch(ranks, body)[0] == pytest.approx(expected, rel=1e-12)


def test_an_evaluation_of_nothing_is_refused() -> None:
    def body(world: wire.World) -> None:
        run, work = placed(world, {"data": 2})
        with pytest.raises(RunError, match="evaluate: expected at least one batch, found none"):
            run.evaluate([])
        ignored = work.batch(0) | {"targets": torch.full_like(work.batch(0)["targets"], -100)}
        with pytest.raises(RunError, match="found a count of 0 on every rank"):
            run.evaluate([ignored])

    wire.threads.launch(2, body)


def test_an_example_is_a_batch() -> None:
    def body(world: wire.World) -> None:
        example: dict = WORK.batch(0) | {"scale": 2.0}
        with pytest.raises(BatchError, match=r"batch\['scale'\]"):
            parallelize(WORK.fresh(), WORK.loss, SGD, None, world=world, example=example)

    wire.threads.launch(1, body)
