"""The loop: steps, evaluations, checkpoints, and a clean end. What computes is done by all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fourfold.config import Config
from fourfold.ledger import Ledger
from fourfold.training import checkpoint, memory
from fourfold.training.checkpoint import Saving
from fourfold.training.data import Batch, Prepared
from fourfold.training.evaluation import evaluating
from fourfold.training.folder import RunFolder, write_json
from fourfold.training.journal import Journal, truncate
from fourfold.training.optimizer import learning_rate
from fourfold.training.progress import Screen
from fourfold.training.run import Run
from fourfold.training.sample import write as write_sample
from fourfold.training.step import StepResult
from fourfold.training.throughput import Throughput

RECORDED = range(2, 5)
"""Steps after the start whose spans are kept: warm, and few enough to look at."""
WEIGHED = 1
"""The step after the start whose memory is measured: warm, and not one of those, since a profiler slows it down."""


@dataclass(frozen=True)
class Ending:
    """How training ended.

    Attributes:
        steps: optimizer steps done.
        stopped: a signal asked for it, before the last step.
        validation: mean loss on the held-out text; None without one.
        sample: text that the model wrote; None where none was asked for.
    """

    steps: int
    stopped: bool
    validation: float | None
    sample: str | None


@dataclass
class Recorder:
    """Where the first rank's records go; on the other ranks nowhere."""

    journal: Journal | None = None
    screens: Sequence[Screen] = field(default_factory=list)

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """Journal a record and show it."""
        if self.journal is not None:
            written = self.journal.write(kind, step, **fields)
            for screen in self.screens:
                screen.show(written)

    def sync(self) -> None:
        """Everything journalled is on the disk."""
        if self.journal is not None:
            self.journal.sync()

    def close(self) -> None:
        """Nothing follows."""
        if self.journal is not None:
            self.journal.close()
        for screen in self.screens:
            screen.close()


@dataclass(frozen=True)
class _Fetched:
    """A batch that leaves a span in the lane "data" for every fetch."""

    batch: Batch
    ledger: Ledger

    @property
    def rows(self) -> int:
        return self.batch.rows

    def __call__(self, rows: range) -> dict[str, Tensor]:
        began = time.perf_counter_ns()
        fetched = self.batch(rows)
        self.ledger.span("data", f"rows {rows.start} to {rows.stop}", began, time.perf_counter_ns())
        return fetched


class Trainer:
    """A run, its data and its settings."""

    def __init__(
        self,
        run: Run,
        data: Prepared,
        config: Config,
        folder: RunFolder,
        recorder: Recorder,
        *,
        throughput: Throughput | None = None,
        resumed: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Put together what a rank needs.

        Args:
            run: placed already.
            data: the same on every rank.
            config: resolved.
            folder: of the run.
            recorder: of the first rank; an empty one elsewhere.
            throughput: to tell utilisation; None leaves it out.
            resumed: the run was loaded from a checkpoint.
            stop: whether this rank has been asked to stop.
        """
        self.run, self.data, self.config, self.folder = run, data, config, folder
        self.recorder, self.throughput, self.stop = recorder, throughput, stop
        self._saving: tuple[int, Saving] | None = None
        self._evaluation = data.source.evaluation(config.train.evaluate_batches)
        self._validated: tuple[int, float] | None = None
        self._first = run.number
        self._saved = run.number if resumed else None

    def train(self) -> Ending:
        """Train until the last step, or until some rank is asked to stop; then save, and evaluate at the end."""
        steps, every = self.config.train.steps, self.config.train.evaluate_every
        stopped = False
        if untried := self.run.placed.untried:
            text = f"the grid was not tried on numbers: {untried}; try a smaller model of the kind"
            self.recorder.write("note", self.run.number, text=text)
        while self.run.number < steps and not stopped:
            result = self._step()
            stopped = result.stop
            if every and self.run.number % every == 0 and not stopped:
                self._evaluate()
            if self._due(self.config.run.checkpoint_every) and not stopped:
                self._save(asynchronous=True)
        self._save(asynchronous=False)
        ending = self._end(stopped=stopped and self.run.number < steps)
        self._write_ledgers()
        return ending

    # ---- the parts of the loop

    def _step(self) -> StepResult:
        number, ledger = self.run.number, self.run.ledger
        if self.run.world.watch is not None:
            self.run.world.watch.step(number)
        ledger.recording = number - self._first in RECORDED
        began = time.perf_counter_ns()
        result = self._taken(number)
        ledger.span("step", f"step {number}", began, time.perf_counter_ns())
        ledger.recording = False
        ledger.notes["step seconds"] = result.seconds
        if number == self._first and self.run.placed.kernels:
            choices = [choice.to_dict() for choice in self.run.placed.kernels]
            self.recorder.write("kernels", self.run.number, choices=choices)
        if self.run.number % self.config.run.log_every == 0 or self.run.number == self.config.train.steps:
            self.recorder.write("step", self.run.number, **self._measures(result))
        self._told_of_saving(wait=False)
        return result

    def _taken(self, number: int) -> StepResult:
        batch = _Fetched(self.data.source.batch(number), self.run.ledger)
        if number - self._first == WEIGHED and memory.measurable(self.run):
            return memory.measure(self.run, lambda: self.run.step(batch, stop=self.stop()))
        return self.run.step(batch, stop=self.stop())

    def _measures(self, result: StepResult) -> dict[str, Any]:
        throughput = self.throughput
        return {
            "loss": result.loss,
            "count": result.count,
            "gradient_norm": result.gradient_norm,
            "lr": learning_rate(self.run.options, result.step),
            "seconds": result.seconds,
            "tokens_per_second": result.count / result.seconds,
            "mfu": throughput.utilisation(result.seconds) if throughput else None,
            "memory": memory.in_use(self.run.world.device),
        }

    def _evaluate(self) -> float | None:
        if not self._evaluation:
            return None
        if self._validated is None or self._validated[0] != self.run.number:
            loss = self.run.evaluate(list(self._evaluation))
            self._validated = (self.run.number, loss)
            count = sum(batch.rows for batch in self._evaluation) * self.data.source.sequence
            self.recorder.write("evaluation", self.run.number, loss=loss, count=count)
        return self._validated[1]

    def _due(self, every: int) -> bool:
        return every > 0 and self.run.number % every == 0 and self.run.number < self.config.train.steps

    def _save(self, *, asynchronous: bool) -> None:
        self._told_of_saving(wait=True)
        self.recorder.sync()
        if self._saved == self.run.number:
            return
        self._saved = self.run.number
        saving = self.run.save(self.folder.checkpoints, keep=self.config.run.keep, asynchronous=asynchronous)
        self._saving = (self.run.number, saving)
        self._told_of_saving(wait=not asynchronous)

    def _told_of_saving(self, *, wait: bool) -> None:
        """Journal a save once it is on the disk, and raise its error if it failed.

        Ranks that write are not done at the same moment, and others at once; so all wait together, told or not.
        """
        if wait:
            self.run.wait()
        if self._saving is None or not (wait or self._saving[1].done):
            return
        step, saving = self._saving
        self._saving = None
        self.recorder.write("checkpoint", step, path=str(saving.wait()))

    def _end(self, *, stopped: bool) -> Ending:
        validation = None if stopped else self._evaluate()
        sample = None if stopped else self._sample()
        self.recorder.write("end", self.run.number, stopped=stopped, validation=validation, sample=sample)
        self.recorder.sync()
        return Ending(self.run.number, stopped, validation, sample)

    def _write_ledgers(self) -> None:
        """What this rank measured, and once for all what the formulas beside the code say of a step's bytes."""
        rank = self.run.world.rank
        write_json(self.folder.ledger / f"rank-{rank}.json", self.run.ledger.to_dict())
        if rank == 0:
            write_json(self.folder.ledger / "formulas.json", self.run.forecast().to_dict())

    def _sample(self) -> str | None:
        wanted = self.config.train.sample
        if wanted is None or self.data.tokenizer is None:
            return None
        with self.run.gathered() as model, evaluating(model):
            text = write_sample(
                model,
                self.data.tokenizer,
                wanted.prompt,
                tokens=wanted.tokens,
                context=self.config.data.sequence,
                temperature=wanted.temperature,
                seed=self.config.seed,
            )
        return text


def resume(run: Run, folder: RunFolder) -> str | None:
    """Continue from the newest whole checkpoint of the folder, if there is one; every rank takes the same.

    Returns:
        The checkpoint's path, or None for a run from the beginning.
    """
    run.ledger.begin(-1)  # belongs to no step
    newest = checkpoint.latest(folder.checkpoints)
    found = [rank[0] for rank in run.mesh.everyone.collect([float(newest is not None)])]
    if len(set(found)) > 1:
        without = ", ".join(str(rank) for rank, found_one in enumerate(found) if not found_one)
        raise checkpoint.CheckpointError(
            f"{folder.checkpoints}: expected the same checkpoints on every rank, found none on rank {without}; "
            "is the folder shared by all machines?"
        )
    if newest is not None:
        run.load(newest)
    return str(newest) if newest is not None else None


def open_journal(folder: RunFolder, step: int, path: str | None) -> Journal:
    """The first rank's journal: new, or cut back to the step that is resumed."""
    if folder.journal.exists():
        truncate(folder.journal, step, path)
    return Journal(folder.journal)
