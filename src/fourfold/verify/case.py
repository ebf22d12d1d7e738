"""What is verified: a model, a plan, batches; and how one rank gathers the evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.ledger import Flow, Ledger, Traffic
from fourfold.placement.precision import Precision
from fourfold.plan import Plan
from fourfold.training.batch import Batch
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import Run, parallelize
from fourfold.training.step import Loss
from fourfold.verify.buffers import Watch, digest
from fourfold.verify.measure import Distance, between, worst, worst_buffer, worst_of_norms
from fourfold.verify.serial import Serial, SerialStep, Types
from fourfold.wire import World

Weights = Callable[[str, int, int, torch.dtype], Tensor]


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        model: makes the model that is parallelized, and says where its weights come from (None: from itself).
        plain: makes the same model with its weights, for the reference.
        loss: `loss(model, batch) -> (sum, count)`.
        options: of the optimizer.
        plan: what is verified.
        batch: the global batch of a step.
        seed: of both sides.
        steps: optimizer steps.
    """

    model: Callable[[], tuple[nn.Module, Weights | None]]
    plain: Callable[[], nn.Module]
    loss: Loss
    options: OptimizerOptions
    plan: Plan
    batch: Callable[[int], Batch]
    seed: int
    steps: int

    @property
    def microbatches(self) -> int:
        """Into how many micro-batches the plan cuts a step's rows."""
        return getattr(self.plan.schedule.options, "microbatches", 1)

    @property
    def parts(self) -> int:
        """Into how many pieces the plan cuts a step's rows."""
        return self.plan.placement.parts * self.microbatches


@dataclass(frozen=True)
class StepEvidence:
    """One step, parallel beside serial.

    Attributes:
        loss, serial_loss: mean losses.
        loss_error, gradient, weight: parallel against serial.
        rounding: the reference with its rows cut as the plan cuts them, and its losses divided where the step divides
            them, against the reference: what plain PyTorch itself differs by when it rounds in another order.
        addends: gradient error relative to the addends of its sum, in the norm.
        buffer: of the floating buffers that training changes (running statistics): parallel against serial.
    """

    step: int
    loss: float
    serial_loss: float
    loss_error: Distance
    gradient: Distance
    weight: Distance
    rounding: Distance
    addends: Distance
    buffer: Distance = Distance()


@dataclass(frozen=True)
class Moved:
    """A flow of one rank in one step that was not as predicted, or (rank 0, first step) any flow."""

    rank: int
    step: int
    flow: Flow
    predicted: Traffic
    measured: Traffic

    @property
    def equal(self) -> bool:
        """Calls and bytes are as predicted."""
        return self.predicted == self.measured


@dataclass(frozen=True)
class Evidence:
    """What one rank saw. Only rank 0 holds steps.

    Attributes:
        digest: of the weights after the last step.
        inexact: why the model's random numbers cannot be those of one process, one line each.
        narrow: the first module that computes in a narrower type than the plan's; "" if there is none. Of rank 0.
        buffers: digest by name of the floating buffers that training changed, over all steps.
    """

    rank: int
    steps: tuple[StepEvidence, ...]
    moved: tuple[Moved, ...]
    digest: int
    inexact: tuple[str, ...]
    buffers: dict[str, int] = field(default_factory=dict)
    narrow: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Evidence:
        """Read what `to_dict` gave."""
        steps = tuple(_step_of(one) for one in plain["steps"])
        moved = tuple(
            Moved(one["rank"], one["step"], Flow(*one["flow"]), Traffic(**one["predicted"]), Traffic(**one["measured"]))
            for one in plain["moved"]
        )
        return cls(
            plain["rank"],
            steps,
            moved,
            plain["digest"],
            tuple(plain["inexact"]),
            *(plain[key] for key in ("buffers", "narrow")),
        )


def _step_of(plain: dict[str, Any]) -> StepEvidence:
    fields: dict[str, Any] = {
        key: Distance(**value) if isinstance(value, dict) else value for key, value in plain.items()
    }
    return StepEvidence(**fields)


def examine(world: World, case: Case) -> Evidence:
    """Run the plan's steps on this rank; on rank 0 the reference beside it. All ranks call together."""
    model, weights = case.model()
    example = case.batch(0)(range(1))
    ledger = Ledger(rank=world.rank, step=-1)  # what moves before the first step belongs to no step
    run = parallelize(
        model,
        case.loss,
        case.options,
        case.plan,
        world=world,
        seed=case.seed,
        example=example,
        weights=weights,
        ledger=ledger,
    )
    reference = References(case, run) if world.rank == 0 else None
    watch, steps = Watch(run.model), list[StepEvidence]()
    for number in range(case.steps):
        result = run.step(case.batch(number))
        gradients, masters = run.logical_gradients(), run.logical_state()
        watch.look()
        if reference is not None:
            steps.append(reference.compare(number, result.loss, gradients, masters, watch))
    weights_digest = 0
    for name, value in sorted(run.logical_state().items()):
        weights_digest = digest(value, digest(name, weights_digest))
    moved = tuple(_moved(run, case.steps))
    inexact, narrow = run.placed.anatomy.inexact, (reference.whole.narrow or "") if reference is not None else ""
    return Evidence(world.rank, tuple(steps), moved, weights_digest, inexact, watch.digests, narrow)


class References:
    """The reference, and beside it the same with rows cut and losses divided as in a step of the plan."""

    def __init__(self, case: Case, run: Run) -> None:
        precision = Precision.of(case.plan.placement.precision, run.world.device)
        types = Types(precision.master, precision.message, precision.compute)
        self.case, self.blocks = case, run.placed.anatomy.blocks
        # Statistics of batch norms belong to a micro-batch: the reference takes the same micro-batches, and no others.
        scoped = bool(run.placed.anatomy.batch_norms)
        self.pieces = (case.microbatches, case.microbatches) if scoped else (1, case.parts)
        self.divisor: float | None = None
        self.whole, self.cut = (
            Serial(
                case.plain(),
                case.loss,
                case.options,
                seed=case.seed,
                types=types,
                blocks=self.blocks,
                layouts=run.placed.anatomy.layouts,
            )
            for _ in range(2)
        )
        self.watch = Watch(self.whole.model)

    def compare(
        self,
        number: int,
        loss: float,
        gradients: dict[str, Tensor],
        masters: dict[str, Tensor],
        buffers: Watch,
    ) -> StepEvidence:
        """Take the step on both references, and hold the parallel numbers against the first.

        Args:
            number: of the step.
            loss: mean loss of the parallel step.
            gradients: of the parallel step, by name.
            masters: weights after it, by name.
            buffers: of the parallel run.
        """
        asked = self.case.batch(number)
        batch = asked(range(asked.rows))
        whole = self.whole.step(number, batch, self.pieces[0])
        cut = self.cut.step(number, batch, self.pieces[1], self.divisor or float(asked.rows))
        self.divisor = whole.count
        return StepEvidence(
            number,
            loss,
            whole.loss,
            between(loss, whole.loss),
            worst(_on_cpu(gradients), whole.gradients, self.blocks),
            worst(_on_cpu(masters), self.whole.weights(), self.blocks),
            self._rounding(whole, cut),
            worst_of_norms(_on_cpu(gradients), whole.gradients, cut.magnitudes, self.blocks),
            self._buffers(buffers),
        )

    def _buffers(self, parallel: Watch) -> Distance:
        """Those that either side has changed."""
        self.watch.look()
        mine, plain = _on_cpu(parallel.values()), self.watch.values()
        names = (parallel.changed | self.watch.changed) & mine.keys() & plain.keys()
        return worst_buffer({name: mine[name] for name in names}, {name: plain[name] for name in names})

    def _rounding(self, whole: SerialStep, cut: SerialStep) -> Distance:
        found = (
            between(cut.loss, whole.loss),
            worst(cut.gradients, whole.gradients, self.blocks),
            worst(self.cut.weights(), self.whole.weights(), self.blocks),
        )
        return max(found, key=lambda distance: distance.error)


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _moved(run: Run, steps: int) -> list[Moved]:
    predicted = run.forecast().traffic()
    rows = []
    for step in range(steps):
        measured = run.ledger.traffic(step)
        for flow in sorted(predicted.keys() | measured.keys()):
            row = Moved(run.world.rank, step, flow, predicted.get(flow, Traffic()), measured.get(flow, Traffic()))
            if not row.equal or (run.world.rank == 0 and step == 0):
                rows.append(row)
    return rows
