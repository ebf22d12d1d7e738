"""One optimizer step: a schedule's program, driven, with placement inside its actions and sync between replicas."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fourfold.ledger import Ledger
from fourfold.placement import Placed, norm
from fourfold.placement.rows import share
from fourfold.plan import Rule, Technique
from fourfold.randomness import Position
from fourfold.schedule import Action, Inline, Program, Shape, bind, drive, validate
from fourfold.training.batch import Batch
from fourfold.training.optimizer import Optimizer
from fourfold.training.tally import Courier, Exchange, Tally, agreed, not_finite
from fourfold.wire import Axis, Mesh, formulas
from fourfold.wire.axis import DIGEST_BITS

Loss = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Tensor | int]]
"""`loss(model, batch) -> (sum, count)`: calls the model itself, sums over tokens or rows, says how many there were."""


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
class _Sums:
    """What a step adds up on this rank."""

    loss: float = 0.0
    count: float = 0.0


@dataclass
class Step:
    """The step's fixed parts, and its three bodies: forward, backward, update.

    Attributes:
        batch: of the last step; before the first, the example that the model was placed by.
        divisor: losses are divided by it before backward. It is the count of the step before: where that is this step's
            count as well, as in most training, the summed gradients are the mean's and need no further pass. The first
            step takes the rows of its batch.
    """

    placed: Placed
    rule: Rule
    optimizer: Optimizer
    loss: Loss
    mesh: Mesh
    ledger: Ledger
    schedule: Technique
    seed: int
    device: torch.device
    batch: Batch
    divisor: float | None = None
    program: Program = field(init=False)

    def __post_init__(self) -> None:
        self.microbatches: int = getattr(self.schedule.options, "microbatches", 1)
        order = self.schedule.module.order(Shape(microbatches=self.microbatches), self.schedule.options)
        self.program = validate(bind(order, workers=1))
        self.everyone: Axis = self.mesh.over("z", "data")
        self._courier: Courier = self.placed.seats or Exchange(self.everyone, self.device)
        self._under_way = False
        self._machine = Inline({"forward": self._forward, "backward": self._backward, "update": self._update})

    def run(self, number: int, batch: Batch, *, stop: bool) -> StepResult:
        """Take optimizer step `number` on the global batch."""
        began = time.perf_counter()
        self.ledger.begin(number)
        self._number, self.batch, self._stop = number, batch, stop
        self._sums, self._output = _Sums(), None
        self._divided = self.divisor or float(batch.rows)
        if self._under_way:
            self.rule.finish()
            self.placed.abandon()
        self.placed.begin()
        self._under_way = True
        timeline = drive(self.program, self._machine)
        self._under_way = False
        if self.ledger.recording:
            self.ledger.spans += timeline.spans()
        whole, seconds = self._whole, time.perf_counter() - began
        mean, count = whole.loss / whole.counted, int(whole.counted)
        return StepResult(number, mean, count, self._gradient_norm, seconds, bool(whole.stop))

    # ---- bodies

    def _forward(self, action: Action) -> None:
        microbatch = action.microbatches.start
        rows = share(self.batch.rows, self.microbatches, self.everyone.size, microbatch, self.everyone.index)
        # A rank without rows computes one that does not count: it must take part in every collective.
        counts = len(rows) > 0
        rows = rows if counts else range(1)
        inputs = {name: tensor.to(self.device) for name, tensor in self.batch(rows).items()}
        self.placed.look_at(inputs)
        with self.placed.forward(Position(self.seed, self._number, rows.start, len(rows)), counts=counts):
            total, count = self.loss(self.placed.model, inputs)
        self._output = total if counts else total * 0
        if counts:
            self._sums.loss += float(total.detach())
            self._sums.count += float(count)

    def _backward(self, action: Action) -> None:
        output, self._output = self._output, None
        assert output is not None
        last = action.microbatches.stop == self.microbatches
        if last:
            digest = float((self.mesh.digest() + self.batch.rows) % 2**DIGEST_BITS)
            self._courier.give(Tally(self._sums.loss, self._sums.count, digest, float(self._stop)))
        if output.itemsize < 4:  # 1 / count would be rounded
            self._divided = 1.0
        self.placed.backward(output, 1.0 / self._divided, last=last)

    def _update(self, action: Action) -> None:
        self.rule.finish()
        whole = agreed(self._number, [Tally(*numbers) for numbers in self._courier.take()])
        factor = self._divided / whole.counted
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
        cut = (self.microbatches, self.everyone.size)
        mine = [share(self.batch.rows, *cut, number, self.everyone.index) for number in range(self.microbatches)]
        return [dict(self.batch(rows if len(rows) else range(1))) for rows in mine]

    def forecast(self) -> Ledger:
        """The bytes that this rank will hand over in one step like the last one, by the formulas beside the code."""
        ledger = Ledger(rank=self.ledger.rank)
        self.placed.forecast(ledger, self.microbatches, self._shapes() if self.placed.split is not None else ())
        sizes = [unit.arena.summed.numel() for unit in self.placed.units if unit.arena.layout.trained]
        self.rule.forecast(ledger, sizes, self.placed.units[0].arena.gradient.element_size())
        self._courier.forecast(ledger)
        holders = self.mesh.replica
        if holders.size > 1 and self.optimizer.options.clip is not None:
            ledger.send(holders.name, "control", "all_gather", formulas.all_gather(holders.size, holders.size * 8))
        return ledger
