"""One optimizer step: a schedule's program, driven, with placement inside its actions and sync between replicas."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.ledger import Ledger
from fourfold.placement import Placed, norm
from fourfold.placement.pipe.shared import SharedGradients
from fourfold.placement.rows import share
from fourfold.placement.traffic import Pass
from fourfold.plan import Rule
from fourfold.schedule import Action, Body, Buffer, Inline, Program, Ranks, Timeline, drive
from fourfold.schedule.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, REDUCE, UPDATE
from fourfold.schedule.laid import uses
from fourfold.schedule.ready import Mode, drive_ready
from fourfold.schedule.work import Piece
from fourfold.training.batch import Batch
from fourfold.training.loss_value import Loss as Loss
from fourfold.training.optimizer import Optimizer
from fourfold.training.passes import Form, Job, Passes
from fourfold.training.pipeline import evaluation
from fourfold.training.post import Post, kind_of
from fourfold.training.tally import Courier, Exchange, Tally, agreed, not_finite
from fourfold.wire import Axis, Mesh, formulas
from fourfold.wire.axis import DIGEST_BITS
from fourfold.wire.links import Links

COMPLETING = (BACKWARD, BACKWARD_WEIGHT)
"""After these kinds of action a micro-batch's gradients of a stage are complete."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step came to, the same on every rank except for `seconds`.

    Attributes:
        step: its number, from 0.
        loss: mean loss, the global sum over the global count.
        count: tokens (or rows) that counted, over all ranks.
        gradient_norm: of the whole gradient before clipping; None where nobody asked for it.
        seconds: wall time of this rank.
        stop: some rank asked to stop.
    """

    step: int
    loss: float
    count: int
    gradient_norm: float | None
    seconds: float
    stop: bool


@dataclass
class Step:
    """The step's fixed parts, and the end that every schedule comes to: the update.

    Attributes:
        batch: of the last step; before the first, the example that the model was placed by.
        divisor: losses are divided by it before backward. It is the count of the step before: where that is this step's
            count as well, as in most training, the summed gradients are the mean's and need no further pass. The first
            step takes the rows of its batch.
        rows: the ranks over which the rows of a micro-batch are cut.
        told: the ranks that tell each other of a step.
        kept: passes of this rank after which gathered weights stay for the next one.
        mode: how it chooses among what is ready; None: it keeps to the order.
    """

    placed: Placed
    rule: Rule
    optimizer: Optimizer
    loss: Loss
    mesh: Mesh
    ledger: Ledger
    program: Program
    microbatches: int
    seed: int
    device: torch.device
    batch: Batch
    kept: frozenset[Piece] = frozenset()
    mode: Mode | None = None
    divisor: float | None = None

    def __post_init__(self) -> None:
        self.rows: Axis = self.mesh.over("z", "data")
        self.passes = Passes(self.placed, self.loss, self.rows, self.seed, self.device)
        self._pipe = self.mesh["pipe"]
        # Ranks of one stage lie side by side.
        self.told = self.rows if self._pipe.size == 1 else self.mesh.over("z", "data", "pipe")
        self._courier: Courier = self.placed.seats or Exchange(self.told, self.device)
        self._under_way = False
        self._crossed: dict[Buffer, list[Form | None]] = {}
        # What it computes: a move has two ends, and is no one's own.
        actions = (action for action in self.program.actions if action.source is None)
        self._own = [action for action in actions if action.worker == self._pipe.index]
        self._back = Counter(action.stage for action in self._own if action.kind in COMPLETING)
        self._updates = sum(action.kind == UPDATE for action in self._own)
        self._lockstep = self.mesh.over("x", "y", "z", "data") if self.mode is not None else self.mesh.over()
        part = self.placed.part
        self._shared = None if part is None else SharedGradients(part, self.placed.units, self._pipe)
        self._links = Links(self._pipe) if self._pipe.size > 1 else None
        passes = self.passes
        bodies: dict[str, Body] = {
            FORWARD: passes.forward,
            BACKWARD: self._completing(passes.backward),
            BACKWARD_INPUT: passes.backward_input,
            BACKWARD_WEIGHT: self._completing(passes.backward_weight),
            REDUCE: passes.reduce,
            UPDATE: self._update,
        }
        self._machine = self._machine_for(self.program, bodies)

    def _machine_for(self, program: Program, bodies: Mapping[str, Body]) -> Inline | Ranks[Any]:
        if self._links is None:
            return Inline(bodies)
        return Ranks(program, self._pipe.index, bodies, Post(self._links, self.passes))

    def run(self, number: int, batch: Batch, *, stop: bool) -> StepResult:
        """Take optimizer step `number` on the global batch."""
        began = time.perf_counter()
        self.ledger.begin(number)
        self._number, self.batch, self._stop = number, batch, stop
        divided = self.divisor or float(batch.rows)
        self.passes.job = Job(number, batch, self.microbatches, divided, self._back.copy(), self.kept)
        self._backwards, self._updated = 0, 0
        if self._under_way:
            self.rule.finish()
            self.placed.abandon()
        self.placed.begin()
        self._under_way = True
        timeline = self._driven(self.program, self._machine, self.mode)
        self._under_way, self._crossed = False, self.passes.job.forms
        if self.ledger.recording:
            self.ledger.spans += timeline.spans()
        whole, seconds = self._whole, time.perf_counter() - began
        mean, count = whole.loss / whole.counted, int(whole.counted)
        return StepResult(number, mean, count, self._gradient_norm, seconds, bool(whole.stop))

    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Sums of loss and count over the batches, of this rank's rows, where it holds the last stage."""
        self.passes.job = Job(-1, batches[0], 1, 1.0, Counter())
        self.passes.batches = batches
        program = evaluation(self.program, len(batches))
        with torch.no_grad():
            self._driven(program, self._machine_for(program, {FORWARD: self.passes.evaluate}))
        return self.passes.job.loss, self.passes.job.count

    def _driven(self, program: Program, machine: Inline | Ranks[Any], mode: Mode | None = None) -> Timeline:
        """Run a program; where it fails, the other stages hear of it at once."""
        try:
            if mode is None or isinstance(machine, Inline):
                return drive(program, machine)
            return drive_ready(program, machine, mode, self._agree if self._lockstep.size > 1 else None)
        except BaseException:
            if self._links is not None:
                self._links.break_off()
            raise

    def _agree(self, number: int) -> int:
        """The action that all ranks of this stage run next: they share sums and gathers inside of it."""
        return int(min(found for (found,) in self._lockstep.collect([float(number)])))

    def close(self) -> None:
        """End the threads that wait for messages of other stages."""
        if self._links is not None:
            self._links.close()

    # ---- bodies

    def _completing(self, body: Body) -> Body:
        """A body that completes a micro-batch's gradients; with the last of all, the rank's tally leaves."""

        def complete(action: Action) -> None:
            self._backwards += 1
            if self._backwards == self._back.total():
                job = self.passes.job
                digest = float((self.mesh.digest() + self.batch.rows) % 2**DIGEST_BITS)
                self._courier.give(Tally(job.loss, job.count, digest, float(self._stop)))
            body(action)

        return complete

    def _update(self, action: Action) -> None:
        """All of this rank's stages together, once the last of them is complete: clipping looks at all of them."""
        self._updated += 1
        if self._updated < self._updates:
            return
        self.rule.finish()
        if self._shared is not None:
            self._shared.sum()
        whole = agreed(self._number, [Tally(*numbers) for numbers in self._courier.take()], self._pipe.size)
        factor = self.passes.job.divided / whole.counted
        gradient_norm = self._norm(factor)
        if gradient_norm is not None:
            factor *= norm.coefficient(gradient_norm, self.optimizer.options.clip)
        self.optimizer.step(self.optimizer.rate(self._number), factor)
        self.placed.refresh()
        self.divisor = whole.counted
        self._whole, self._gradient_norm = whole, gradient_norm

    def _norm(self, factor: float) -> float | None:
        """The norm of the whole gradient times `factor`, if it is to be clipped."""
        options = self.optimizer.options
        if options.clip is None:
            return None
        order = float(options.clip_norm)
        # Shards are disjoint over x, y and z, copies counted once; over data they are the same.
        shares = self.mesh.replica.collect([self.placed.norm_share(order)])
        found = norm.total([share[0] for share in shares], order) * factor
        if not math.isfinite(found):
            broken = [index for index, share in enumerate(shares) if not math.isfinite(share[0])]
            raise not_finite(self._number, "gradient", broken)
        return found

    def _shapes(self) -> list[dict[str, Tensor]]:
        """This rank's rows of every micro-batch of the batch."""
        cut = (self.microbatches, self.rows.size)
        mine = [share(self.batch.rows, *cut, number, self.rows.index) for number in range(self.microbatches)]
        return [dict(self.batch(rows if len(rows) else range(1))) for rows in mine]

    def forecast(self) -> Ledger:
        """The bytes that this rank will hand over in one step like the last one, by the formulas beside the code."""
        ledger = Ledger(rank=self.ledger.rank)
        passes = [Pass(*use) for use in uses(self.program, self._pipe.index, self.kept)]
        self.placed.forecast(ledger, passes, self._shapes() if self.placed.split is not None else ())
        sizes = [unit.arena.summed.numel() for unit in self.placed.units if unit.arena.layout.trained]
        self.rule.forecast(ledger, sizes, self.placed.units[0].arena.gradient.element_size())
        self._courier.forecast(ledger)
        if self._shared is not None:
            self._shared.forecast(ledger)
        for action in self.program.actions:
            if action.source == self._pipe.index:
                buffer = action.reads[0]
                sent = formulas.message(self._crossed[buffer])
                ledger.send(self._pipe.name, kind_of(buffer), "send", sent)
        if self._lockstep.size > 1:
            size = self._lockstep.size
            for _ in self._own:
                ledger.send(self._lockstep.name, "control", "all_gather", formulas.all_gather(size, size * 8))
        holders = self.mesh.replica
        if holders.size > 1 and self.optimizer.options.clip is not None:
            ledger.send(holders.name, "control", "all_gather", formulas.all_gather(holders.size, holders.size * 8))
        return ledger
