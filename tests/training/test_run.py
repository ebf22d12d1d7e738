"""A run's own calls: what one rank cannot do, no rank does; and what cannot be is refused in words."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.training import checkpoint
from fourfold.training.checkpoint.coordination import Job
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
