"""A stage that raises, stalls or is killed within a schedule is named, the others stop, and a resume is exact."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.training import checkpoint
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.run import parallelize
from plain import Work, gpt, serial, worst
from ranks import Processes, ProcessFailed

PLAN = {"placement": {"pipe": 2, "precision": "fp64"}, "schedule": {"name": "1f1b", "microbatches": 4}}


class Trouble(RuntimeError):
    """What the loss raises."""


def _raise() -> None:
    raise Trouble("the seventh value is wrong")


def _stall() -> None:
    time.sleep(600)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], None]] = {"raise": _raise, "stall": _stall, "kill": _kill}


def train(world: wire.World, fault: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Four steps, with a checkpoint after the second; in the third, in the last stage's third micro-batch, a fault."""
    torch.set_num_threads(1)
    work, calls = Work(gpt(0.2)), [0]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        calls[0] += not batch["tokens"].is_meta  # the model was looked at without values before
        if fault and world.rank == 1 and calls[0] == 2 * 4 + 3:
            FAULTS[fault]()
        return cross_entropy(model, batch)

    run = parallelize(work.fresh(), loss, work.options, PLAN, world=world, seed=1, example=work.batch(0))
    newest = checkpoint.latest(Path(folder))
    if newest is not None:
        run.load(newest)
    losses = []
    for step in range(run.number, work.steps):
        losses.append(run.step(work.batch(step)).loss)
        if step == 1:
            run.save(folder)
    state = run.logical_state()
    run.close()
    return losses, state


@pytest.mark.parametrize("fault", FAULTS)
def test_the_stage_is_named_and_the_others_stop(gloo: Processes, fault: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ProcessFailed) as caught:
        gloo(2, train, fault, str(tmp_path), timeout=60.0, patience=8.0)
    assert time.monotonic() - began < 50
    said = "".join(caught.value.reports.values())
    if fault == "raise":
        assert "the seventh value is wrong" in said
        assert "during forward of stage 1, micro-batch 2, worker 1" in said
    elif fault == "kill":
        assert caught.value.rank == 1
    else:
        assert "message from rank 1" in said
    expected = serial(Work(gpt(0.2)))
    for losses, weights in gloo(2, train, "", str(tmp_path), timeout=60.0):
        assert losses == pytest.approx(expected.losses[2:], rel=1e-12, abs=0)
        assert worst(weights, expected.weights) <= 1e-12


def test_a_stage_that_raises_among_threads_is_named(tmp_path: Path) -> None:
    with pytest.raises(wire.RankFailed) as caught:
        wire.threads.launch(2, train, "raise", str(tmp_path))
    assert caught.value.rank == 1
    assert "during forward of stage 1, micro-batch 2, worker 1" in getattr(caught.value.__cause__, "__notes__", ())
