"""Forward and backward of one micro-batch through one stage: the bodies of a schedule's actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourfold.placement import Placed
from fourfold.placement.pipe.bundle import Bundle, gradients
from fourfold.placement.pipe.deferred import Undone
from fourfold.placement.refusals import PlacementError
from fourfold.placement.rows import share
from fourfold.randomness import Position
from fourfold.schedule import Action, Buffer
from fourfold.schedule.action import ACTIVATION, ACTIVATION_GRADIENT, DEFERRED, FORWARD, STASH
from fourfold.schedule.work import Piece, piece_of
from fourfold.training.batch import Batch
from fourfold.training.loss_value import Loss
from fourfold.wire import Axis

Form = tuple[tuple[int, ...], int]
"""Of a tensor: its shape, and bytes of an element."""


@dataclass
class Kept:
    """What a forward keeps for its backward.

    Attributes:
        given: what came from the stage before; None for the first.
        made: what goes to the next stage; of the last stage, the loss.
    """

    given: Bundle | None
    made: Bundle | Tensor


@dataclass
class Job:
    """What is the same for all actions of a step.

    Attributes:
        number: of the step.
        batch: the global one.
        microbatches: into which its rows are cut.
        divided: losses are divided by it before backward.
        left: of each stage on this rank, the micro-batches that are not all the way back.
        kept: passes after which gathered weights stay.
        loss, count: sums over the rows that this rank has computed; on the ranks of the last stage.
        buffers: what is here of what actions write, by name.
    """

    number: int
    batch: Batch
    microbatches: int
    divided: float
    left: Counter[int]
    kept: frozenset[Piece] = frozenset()
    loss: float = 0.0
    count: float = 0.0
    buffers: dict[Buffer, Kept | Bundle | tuple[Tensor | None, ...] | list[Undone]] = field(default_factory=dict)
    forms: dict[Buffer, list[Form | None]] = field(default_factory=dict)
    """Of what this rank's stages give one another."""


class Passes:
    """Runs actions on a placed model."""

    def __init__(self, placed: Placed, loss: Loss, rows: Axis, seed: int, device: torch.device) -> None:
        """`rows`: the ranks over which the rows of a micro-batch are cut."""
        self.placed, self.loss, self.rows, self.seed, self.device = placed, loss, rows, seed, device
        self.job: Job
        self.batches: Sequence[Batch] = ()
        """Those of an evaluation."""

    def forward(self, action: Action) -> None:
        """Keeps what backward needs, and what the next stage is given."""
        job, stage, microbatch = self.job, action.stage, action.microbatches.start
        given = job.buffers.pop(Buffer(ACTIVATION, stage - 1, microbatch), None)
        assert given is None or isinstance(given, Bundle)
        given = None if given is None else given.detached()
        rows = share(job.batch.rows, job.microbatches, self.rows.size, microbatch, self.rows.index)
        computed = rows or range(1)
        position = Position(self.seed, job.number, computed.start, len(computed))
        with self._kept(action):
            made = self.run(stage, rows, position, given)
        if isinstance(made, Bundle):
            buffer = Buffer(ACTIVATION, stage, microbatch)
            job.buffers[buffer], job.forms[buffer] = made, [((made.words,), 8), *_forms(made.values)]
        else:
            total, count = made
            made = total if len(rows) else total * 0
            if len(rows):
                job.loss += float(total.detach())
                job.count += float(count)
        job.buffers[Buffer(STASH, stage, microbatch)] = Kept(given, made)

    def run(
        self, stage: int, rows: range, position: Position | None, given: Bundle | None
    ) -> Bundle | tuple[Tensor, Tensor | int]:
        """One stage on some logical rows of the job's batch.

        A rank without rows computes one that does not count: it must take part in every collective.

        Args:
            position: of the rows; None: an evaluation.
            given: what the stage before gave.
        """
        counts = len(rows) > 0
        batch = self.job.batch(rows if counts else range(1))
        inputs = {name: tensor.to(self.device) for name, tensor in batch.items()}
        self.placed.look_at(inputs)
        with self.placed.forward(position, counts=counts, stage=stage):
            if self.placed.line is None:
                return self.loss(self.placed.model, inputs)
            return self.placed.line.run(stage, lambda: self.loss(self.placed.model, inputs), given)

    def bundle(self, stage: int, description: Tensor, values: Sequence[Tensor]) -> Bundle:
        """What stage `stage` gave, as it has come from another rank."""
        assert self.placed.line is not None
        return Bundle.of(description, values, self.placed.line.crossing(stage + 1))

    def backward(self, action: Action) -> None:
        """Gives the stage before the gradients of what it gave."""
        stage, microbatch = action.stage, action.microbatches.start
        given, *ends = self._resumed(stage, microbatch)
        with self._kept(action):
            self.placed.backward(*ends, stage=stage, last=self._is_last(stage))
        self._give_back(given, stage, microbatch)

    def backward_input(self, action: Action) -> None:
        """The same without the products that make weights' gradients."""
        stage, microbatch = action.stage, action.microbatches.start
        given, *ends = self._resumed(stage, microbatch)
        self.job.buffers[Buffer(DEFERRED, stage, microbatch)] = self.placed.backward_input(*ends, stage=stage)
        self._give_back(given, stage, microbatch)

    def backward_weight(self, action: Action) -> None:
        """These products."""
        stage, microbatch = action.stage, action.microbatches.start
        undone = self.job.buffers.pop(Buffer(DEFERRED, stage, microbatch))
        assert isinstance(undone, list)
        self.placed.backward_weight(undone, stage=stage, last=self._is_last(stage))

    def reduce(self, action: Action) -> None:
        """This copy of a stage is complete: the word of it goes to the other; gradients are summed at the update."""
        self.job.buffers[action.writes[0]] = ()
        self.job.forms[action.writes[0]] = []

    def _is_last(self, stage: int) -> bool:
        """Counts a micro-batch that comes all the way back through a stage, in whatever sequence they do."""
        self.job.left[stage] -= 1
        return not self.job.left[stage]

    def _kept(self, action: Action) -> AbstractContextManager[None]:
        keeps = piece_of(action) in self.job.kept
        return self.placed.kept(action.stage, keeps=keeps, forward=action.kind == FORWARD)

    def _resumed(self, stage: int, microbatch: int) -> tuple[Bundle | None, list[Tensor], list[Tensor]]:
        """What the stage was given, and where its backward begins, with which gradients."""
        job = self.job
        kept = job.buffers.pop(Buffer(STASH, stage, microbatch))
        assert isinstance(kept, Kept)
        bundle = kept.given or kept.made
        if self.placed.line is not None and isinstance(bundle, Bundle):
            self.placed.line.resume(bundle)
        taken = job.buffers.pop(Buffer(ACTIVATION_GRADIENT, stage + 1, microbatch), None)
        return (kept.given, *self._ends(kept.made, taken))

    def _give_back(self, given: Bundle | None, stage: int, microbatch: int) -> None:
        if given is not None:
            buffer = Buffer(ACTIVATION_GRADIENT, stage, microbatch)
            forms = _forms(given.values, back=True)
            self.job.buffers[buffer], self.job.forms[buffer] = gradients(given.values), forms

    def evaluate(self, action: Action) -> None:
        """One stage's forward on the rows of batch number `action.microbatches.start`; nothing is kept."""
        stage, number = action.stage, action.microbatches.start
        given = self.job.buffers.pop(Buffer(ACTIVATION, stage - 1, number), None)
        assert given is None or isinstance(given, Bundle)
        self.job.batch = self.batches[number]
        rows = share(self.job.batch.rows, 1, self.rows.size, 0, self.rows.index)
        made = self.run(stage, rows, None, given)
        if isinstance(made, Bundle):
            self.job.buffers[Buffer(ACTIVATION, stage, number)] = made
        elif len(rows):
            self.job.loss += float(made[0])
            self.job.count += float(made[1])

    def _divide_later(self, loss: Tensor) -> None:
        if self.placed.line is not None:
            raise PlacementError(
                f"the loss is a sum in {loss.dtype}; on a pipeline all ranks divide by one number, which it would "
                "round: sum up in float32 (losses.cross_entropy does)"
            )
        self.job.divided = 1.0

    def _ends(self, made: Bundle | Tensor, taken: object) -> tuple[list[Tensor], list[Tensor]]:
        """Where backward begins, and with which gradients."""
        if isinstance(made, Tensor):
            if made.itemsize < 4:  # 1 / count would be rounded
                self._divide_later(made)
            return [made], [torch.full_like(made, 1.0 / self.job.divided)]
        assert isinstance(taken, tuple)
        return made.ends(taken)


def _forms(values: Sequence[Tensor], *, back: bool = False) -> list[Form | None]:
    """`back`: of their gradients."""
    return [(tuple(one.shape), one.itemsize) if one.requires_grad or not back else None for one in values]
