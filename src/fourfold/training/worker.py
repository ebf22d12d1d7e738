"""One rank of a run. As a program: `python -m fourfold.training.worker RUN_FOLDER`, started by the launcher.

The same body runs alone in the launcher's process, on threads, and under somebody else's torchrun.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from fourfold.config import Config
from fourfold.placement.arena import Fill
from fourfold.placement.tensor.between import refuse_rows
from fourfold.plan import Plan
from fourfold.training import subject, tensorboard, trainer, values
from fourfold.training.data import Prepared, prepare
from fourfold.training.folder import RunFolder
from fourfold.training.process import as_rank, leave
from fourfold.training.progress import Screen
from fourfold.training.run import Run, parallelize
from fourfold.training.stop import Stop
from fourfold.training.throughput import Throughput, estimated_flops, flops_of, gemm_peak
from fourfold.training.trainer import Ending, Recorder, Trainer
from fourfold.wire import World, join
from fourfold.wire.watch import Watch

LATER = 30.0
"""Seconds by which a worker's own time-out comes after the parent's, which knows more and says it better."""


class Rank:
    """What one rank does, from its configuration to the last step.

    Attributes:
        run: once the model is placed.
    """

    def __init__(self, folder: RunFolder, *, screens: Sequence[Screen] = (), stop: Callable[[], bool]) -> None:
        """Nothing is built yet.

        Args:
            folder: of the run; its configuration is resolved.
            screens: shown the records of the first rank.
            stop: whether this rank has been asked to stop.
        """
        self.folder, self.screens, self.stop = folder, list(screens), stop
        self.run: Run | None = None

    def __call__(self, world: World) -> Ending:
        """Build, place, resume, train."""
        config = self.folder.read_config()
        plan = Plan.of(config.plan if isinstance(config.plan, dict) else None)
        data = prepare(
            config.data, rows=config.train.batch, seed=config.seed, tokenizer_file=subject.tokenizer_file(config)
        )
        model, weights = subject.deferred_model(config)
        first = world.rank == 0
        throughput, note = _throughput(config, plan, model, world) if first else (None, None)
        values.fill_buffers(model, config.seed)
        self.run = run = _place(config, plan, model, weights, world)
        path = trainer.resume(run, self.folder)
        recorder = self._recorder(config, run, data, path) if first else Recorder()
        for text in [note] if note else []:
            recorder.write("note", run.number, text=text)
        try:
            ending = Trainer(
                run,
                data,
                config,
                self.folder,
                recorder,
                throughput=throughput,
                resumed=path is not None,
                stop=self.stop,
            ).train()
            run.close()
            return ending
        finally:
            recorder.close()

    @property
    def number(self) -> int | None:
        """The step that the rank is in; None before the first."""
        return self.run.number if self.run is not None else None

    def _recorder(self, config: Config, run: Run, data: Prepared, path: str | None) -> Recorder:
        screens = list(self.screens)
        if tensorboard.wanted(config.run.tensorboard):
            screens.append(tensorboard.Tensorboard(self.folder.path / "tensorboard", resumed=run.number))
        again = self.folder.journal.exists()
        recorder = Recorder(trainer.open_journal(self.folder, run.number, path), screens)
        if again:  # opening the journal has recorded it
            for screen in self.screens:
                screen.show({"kind": "resume", "step": run.number, "path": path})
        parameters = sum(math.prod(slot.block.logical) for unit in run.placed.units for slot in unit.arena.layout.slots)
        inexact = run.placed.anatomy.inexact
        recorder.write(
            "start",
            run.number,
            plan=str(run.plan),
            choices=run.plan.to_dict(),
            ranks=run.world.size,
            parameters=parameters,
            inexact=list(inexact),
        )
        for note in (*data.source.notes, *(f"not exact: {line}" for line in inexact)):
            recorder.write("note", run.number, text=note)
        return recorder


def _place(config: Config, plan: Plan, model: nn.Module, weights: Fill, world: World) -> Run:
    refuse_rows(plan.placement, config.train.batch, getattr(plan.schedule.options, "microbatches", 1))
    return parallelize(
        model,
        subject.loss(config),
        subject.options(config),
        plan,
        world=world,
        seed=config.seed,
        example=subject.example(config),
        weights=weights,
    )


def _throughput(config: Config, plan: Plan, model: nn.Module, world: World) -> tuple[Throughput, str | None]:
    """What rates are compared with, and what a reader should know about it."""
    peak = gemm_peak(plan.placement.precision, world.device)
    note = None
    try:
        flops = flops_of(model, subject.loss(config), subject.example(config)) * config.train.batch
    except Exception as error:  # some models cannot be run without values; a gauge must not end training
        flops = estimated_flops(model, config.train.batch * config.data.sequence)
        note = (
            "MFU takes 6 FLOPs a parameter and token: this model's step looks at values, so that it cannot be "
            f"counted without them ({type(error).__name__}); training is not touched by that"
        )
    return Throughput(flops, peak, world.size), note


def main(arguments: Sequence[str]) -> int:
    """Run one rank under the launcher's agent; the exit code is 0 only if training ended well."""
    folder = RunFolder(Path(arguments[0]))
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    ranks = folder.ranks(attempt)
    with Stop(tells=False) as stop:  # the parent tells
        body = Rank(folder, stop=stop)

        def work() -> None:
            launch = folder.read_config().launch
            torch.set_num_threads(launch.threads)
            watch = Watch(ranks, rank)
            world = join(launch.backend, timeout=launch.stall_after + LATER)
            world.watch = watch
            body(world)
            world.leave()

        return as_rank(ranks, rank, work, lambda: body.number)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
