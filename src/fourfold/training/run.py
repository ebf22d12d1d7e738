"""`parallelize`: a plain model, a loss, an optimizer and a plan become a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fourfold.anatomy import survey
from fourfold.ledger import Ledger
from fourfold.placement import Placed, place
from fourfold.placement.arena import Fill
from fourfold.placement.tensor.between import refuse_rows
from fourfold.plan import Events, Plan, Rule
from fourfold.schedule.laid import kept, mode_of, program_of
from fourfold.training import checkpoint
from fourfold.training.batch import Batch, batch_of
from fourfold.training.boxes import boxes_to_read, boxes_to_write, names_of, not_finite, scalars_of, set_scalars
from fourfold.training.checkpoint.state import encode
from fourfold.training.evaluation import evaluating
from fourfold.training.loss_value import looked_at
from fourfold.training.optimizer import Optimizer, OptimizerOptions, build, group_of
from fourfold.training.pipeline import part_of
from fourfold.training.step import Loss, Step, StepResult
from fourfold.training.values import fill_buffers, values_of
from fourfold.wire import Mesh, World, join

EXAMPLE_ROWS = 3
"""Of the first batch, by which a model is placed where no example was given: what a loss makes of rows that it holds
against one another takes more than one."""


class RunError(ValueError):
    """A run that cannot be started: says what was expected and found, and what to try."""


def parallelize(
    model: nn.Module,
    loss: Loss,
    optimizer: OptimizerOptions,
    plan: Plan | Mapping[str, Any] | None = None,
    *,
    world: World | None = None,
    seed: int = 1,
    example: Mapping[str, Tensor] | None = None,
    weights: Fill | None = None,
    ledger: Ledger | None = None,
) -> Run:
    """Train a plain model on many ranks, with the results of one.

    Args:
        model: any `nn.Module`. It is taken over: its parameters become views of arenas, and which of them require
            gradients is settled; a later change is refused. It may lie on the meta device, if `weights` says where its
            values come from.
        loss: `loss(model, batch) -> (sum, count)`; see `fourfold.training.losses`.
        optimizer: which optimizer, its rate and clipping.
        plan: the four choices; None: one process.
        world: the ranks; None: join what torchrun's environment describes.
        seed: of every random number.
        example: a batch like those to come; None: a few rows of the first one. Three rows that differ are enough; fewer
            are repeated, each turned by a place, where a tensor grid is tried on numbers.
        weights: `weights(name, start, stop, dtype)` gives flat elements of a logical weight; None: the model's own, or
            what the initialisers of a model made by `fourfold.deferred` draw at `seed`.
        ledger: the record to write to.

    Raises:
        RunError: the plan needs another number of ranks, or ranks hold different weights.
    """
    return Run(
        model,
        loss,
        optimizer,
        plan if isinstance(plan, Plan) else Plan.of(plan),
        world or join(),
        seed=seed,
        example=example,
        weights=weights,
        ledger=ledger,
    )


class Run:
    """A model in training. Every method that computes or communicates is called by all ranks together.

    Attributes:
        plan, world, mesh: what runs where.
        ledger: bytes of every step, spans while recording, memory.
        number: the next optimizer step; the position in the data.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: OptimizerOptions,
        plan: Plan,
        world: World,
        *,
        seed: int,
        example: Mapping[str, Tensor] | None,
        weights: Fill | None,
        ledger: Ledger | None,
    ):
        """Use `parallelize`."""
        if plan.world != world.size:
            raise RunError(
                f"plan ({plan}) needs {plan.world} rank{'s'[: plan.world > 1]}, found {world.size}; start {plan.world} "
                f"(torchrun --nproc-per-node {plan.world}), or {plan.placement.fitting(world.size)}"
            )
        self.model, self.loss, self.options, self.plan = model, loss, optimizer, plan
        self.world, self.seed = world, seed
        self.ledger = ledger or Ledger(rank=world.rank)
        self.mesh = Mesh(world, plan.placement.axes(), self.ledger)
        self.number = 0
        self._weights = weights
        self._saving: checkpoint.Saving | None = None
        self._step: Step | None = None
        if example is not None:
            asked = batch_of(example)
            self._place(asked(range(asked.rows)))

    # ---- training

    def step(self, batch: Batch | Mapping[str, Tensor], *, stop: bool = False) -> StepResult:
        """Take one optimizer step on the global batch of `batch.rows` rows.

        Args:
            batch: the global batch: a mapping of tensors, the same on every rank, or something that gives rows when
                asked (then a rank asks for its own rows only).
            stop: this rank wishes to stop after this step; the result's `stop` is true on all ranks if any wished so.

        Raises:
            PlacementError: the plan's grid cannot deal so many rows; before anything is placed or sent.
        """
        asked = batch_of(batch)
        refuse_rows(self.plan.placement, asked.rows, getattr(self.plan.schedule.options, "microbatches", 1))
        step = self._placed_on(asked)
        result = step.run(self.number, asked, stop=stop)
        self.number += 1
        return result

    def evaluate(self, batches: Sequence[Batch | Mapping[str, Tensor]]) -> float:
        """Mean loss over batches, dropout off; the same on every rank.

        Args:
            batches: like those that `step` takes, at least one.

        Raises:
            RunError: no batch, or nothing counted in any.
            PlacementError: the plan's grid cannot deal the rows of one; before anything is sent.
        """
        asked = [batch_of(batch) for batch in batches]
        if not asked:
            raise RunError("evaluate: expected at least one batch, found none; leave it out")
        for batch in asked:
            refuse_rows(self.plan.placement, batch.rows, 1)
        step = self._placed_on(asked[0])
        self.ledger.begin(-1)
        with evaluating(self.model):
            sums = step.evaluate(asked)
        ranks = step.told.collect(sums)
        counted = sum(rank[1] for rank in ranks)
        if counted == 0:
            raise RunError(
                f"evaluate: expected something that counts in {len(asked)} batches, found a count of 0 on every rank; "
                "is every target ignored?"
            )
        return sum(rank[0] for rank in ranks) / counted

    # ---- the logical view

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The model with all its weights on every rank, for reading."""
        with self.ledger.outside_of_steps(), self.placed.gathered() as model:
            yield model

    def logical_state(self) -> dict[str, Tensor]:
        """Master weights by logical name, whole, on every rank."""
        with self.ledger.outside_of_steps():
            return self.placed.logical(lambda unit: unit.arena.shard)

    def logical_gradients(self) -> dict[str, Tensor]:
        """Gradients of the last step by logical name, as the optimizer saw them (divided, clipped), on every rank."""
        with self.ledger.outside_of_steps():
            return self.placed.logical(lambda unit: unit.arena.gradient, trained=True)

    @property
    def placed(self) -> Placed:
        """The placed model."""
        return self._taken.placed

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of this rank's shards."""
        return self._taken.optimizer

    def forecast(self) -> Ledger:
        """The bytes of one step of this rank, by formula."""
        return self._taken.forecast()

    # ---- checkpoints

    def save(
        self, folder: str | Path, *, keep: int = 3, asynchronous: bool = False, extra: Any = None
    ) -> checkpoint.Saving:
        """Write a checkpoint of step `number` under `folder`. Only one replica writes; all ranks call it together.

        Args:
            folder: the folder of checkpoints.
            keep: how many to keep.
            asynchronous: return once the values are copied, and write beside training; `wait` tells when it is there.
                Else it is there, for every rank, when this returns.
            extra: JSON-able state of the caller.

        Raises:
            CheckpointError: on the ranks that could not write; says why.
            RunError: on the other ranks then; names those that could not. Or a weight is no longer finite: nothing is
                written then, and older checkpoints stay.
        """
        self.wait()
        path, step, rank = Path(folder), self._taken, self.world.rank
        with self._together("the checkpoint was not written"):
            self._check_finite(path)
            state = self.state_dict() | {"extra": extra}
            encode(state)
        with self._together("the checkpoint was not written"):
            self._saving = checkpoint.save(
                path,
                self.number,
                boxes_to_write(step),
                state,
                rank=rank,
                writers=self.mesh.first_replica,
                keep=keep,
            )
        saving = self._saving
        if not asynchronous:
            self.wait()
        return saving

    def load(self, path: str | Path) -> Any:
        """Continue from a checkpoint written under any plan. All ranks call it together, with the same checkpoint.

        Returns:
            What was saved as `extra`.

        Raises:
            RunError: it was written with another seed; ranks read different steps, or another rank could not read.
            CheckpointError: it is damaged, or of another model or optimizer. Nothing has been changed then, unless
                bytes on the disk are not those that were saved.
        """
        with self._together("nothing was loaded"):
            path = Path(path)
            state = checkpoint.load(path, [], strict=False)
            self._check_seed(state)
            number = float(state["number"])
        steps = [int(rank[0]) for rank in self._collect(number)]
        if len(set(steps)) > 1:
            found = ", ".join(f"step {step} on rank {rank}" for rank, step in enumerate(steps))
            raise RunError(
                f"load({str(path)!r}): expected the same checkpoint on every rank, found {found}; nothing was loaded. "
                "Call run.wait() on all ranks before checkpoint.latest, and see that all machines share the folder"
            )
        with self._together("weights may be of two steps now: load another checkpoint"):
            state = checkpoint.load(path, boxes_to_read(self._taken), expected=names_of(self._taken))
            self.load_state_dict(state)
        for unit in self.placed.units:
            unit.refresh(whole=True)
        return state.get("extra")

    def wait(self) -> None:
        """An asynchronous save, if one is under way, is on the disk when this returns. All ranks call it together.

        Raises:
            CheckpointError: on the ranks that could not write; says why.
            RunError: on the other ranks then; names those that could not.
        """
        if self._step is None:  # nothing can have been saved
            return
        saving, self._saving = self._saving, None
        with self._together("the checkpoint was not written"):
            if saving is not None:
                saving.wait()

    def close(self) -> None:
        """End the threads that carry messages between the stages of a pipeline; the run takes no further step."""
        if self._step is not None:
            self._step.close()

    def _check_finite(self, folder: Path) -> None:
        broken = not_finite(self._taken.placed)
        if broken is not None:
            raise RunError(
                f"checkpoint of step {self.number}: expected finite weights, found NaN or infinity in {broken!r}; "
                f"nothing was written. Go on from an older one in {folder}, with a lower optimizer.lr or with "
                "optimizer.clip, which refuses a step whose gradient is not finite"
            )

    @contextmanager
    def _together(self, outcome: str) -> Iterator[None]:
        """What fails inside on one rank fails on all of them, so that nobody waits for somebody who has left."""
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        failed = [rank for rank, (flag,) in enumerate(self._collect(float(error is not None))) if flag]
        if error is not None:
            raise error
        if failed:
            raise RunError(f"rank {', '.join(map(str, failed))} failed, and says why; {outcome}")

    def _collect(self, number: float) -> list[list[float]]:
        """A number of every rank, in rank order."""
        with self.ledger.outside_of_steps():
            return self.mesh.everyone.collect([number])

    def state_dict(self) -> dict[str, Any]:
        """Everything mutable that is not a tensor with a logical shape."""
        return {
            "number": self.number,
            "seed": self.seed,
            "divisor": self._taken.divisor,
            "optimizer": scalars_of(self._taken.optimizer),
            "sync": self._taken.rule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._check_seed(state)
        self.number = int(state["number"])
        self._taken.divisor = state["divisor"]
        set_scalars(self._taken.optimizer, state["optimizer"])
        self._taken.rule.load_state_dict(state["sync"])

    def _check_seed(self, state: Mapping[str, Any]) -> None:
        if state["seed"] != self.seed:
            raise RunError(
                f"checkpoint was written with seed {state['seed']}, this run has seed {self.seed}: its random numbers "
                f"would not continue; set seed: {state['seed']}"
            )

    # ---- placing

    @property
    def _taken(self) -> Step:
        if self._step is None:
            raise RunError("the run is not placed yet: give parallelize an `example` batch, or take a step first")
        return self._step

    def _placed_on(self, batch: Batch) -> Step:
        return self._step or self._place(batch(range(min(batch.rows, EXAMPLE_ROWS))))

    def _place(self, example: dict[str, Tensor]) -> Step:
        with self.ledger.outside_of_steps():
            self._step = self._placed_by(example)
        return self._step

    def _placed_by(self, example: dict[str, Tensor]) -> Step:
        program = program_of(self.plan)
        anatomy = survey(self.model, self.loss, example, whole=self.plan.placement.grid.by_rows)
        worker = self.mesh["pipe"].index
        part = part_of(self.model, self.loss, example, anatomy, self.plan, program, worker)
        if self.world.rank == 0:
            for line in anatomy.inexact:
                warnings.warn(f"not exact: {line}", stacklevel=2)
        events, codec = Events(), self.plan.replica_codec()
        weights = self._weights or values_of(self.model, self.mesh, self.seed)
        fill_buffers(self.model, self.seed)
        device = self.world.device
        placed = place(
            self.model,
            anatomy,
            self.mesh,
            self.plan.placement,
            fill=weights,
            group=group_of,
            events=events,
            device=device,
            codec=codec if self.plan.wire.gradient else None,
            seats=self.plan.tallies_ride(),
            loss=self.loss,
            example=example,
            part=part,
        )
        untried = placed.untried
        if untried and self.world.rank == 0:
            warnings.warn(
                f"the grid was not tried on numbers: {untried}; try a smaller model of the kind", stacklevel=2
            )
        rule: Rule = self.plan.sync.module.Rule(self.plan.sync.options, self.mesh["data"], events, codec)
        optimizer = build(self.options, placed.shards)
        loss = looked_at(self.loss)
        microbatches = self.plan.schedule.options.microbatches
        about = self.mesh, self.ledger, program, microbatches, self.seed, device
        choices = kept(self.plan, program, worker), mode_of(self.plan, program)
        return Step(placed, rule, optimizer, loss, *about, batch_of(example), *choices)
