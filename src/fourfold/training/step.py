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
from fourfold.wire import Axis, Mesh, Work, formulas

Loss = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Tensor | int]]
"""`loss(model, batch) -> (sum, count)`: calls the model itself, sums over tokens or rows, says how many there were."""


_CONTROL = 4
"""Numbers that ranks tell each other in a step: loss, count, digest, stop."""


class StepError(RuntimeError):
    """A step that must not be taken: says which, on which ranks, and why."""


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
    """The step's fixed parts, and its three bodies: forward, backward, update."""

    placed: Placed
    rule: Rule
    optimizer: Optimizer
    loss: Loss
    mesh: Mesh
    ledger: Ledger
    schedule: Technique
    seed: int
    device: torch.device
    program: Program = field(init=False)

    def __post_init__(self) -> None:
        self.microbatches: int = getattr(self.schedule.options, "microbatches", 1)
        order = self.schedule.module.order(Shape(microbatches=self.microbatches), self.schedule.options)
        self.program = validate(bind(order, workers=1))
        self.everyone: Axis = self.mesh.over("z", "data")
        self._machine = Inline({"forward": self._forward, "backward": self._backward, "update": self._update})

    def run(self, number: int, batch: Batch, *, stop: bool) -> StepResult:
        """Take optimizer step `number` on the global batch."""
        began = time.perf_counter()
        self.ledger.begin(number)
        self._number, self._batch, self._stop = number, batch, stop
        self._sums, self._output = _Sums(), None
        self.placed.begin()
        timeline = drive(self.program, self._machine)
        if self.ledger.recording:
            self.ledger.spans += timeline.spans()
        loss, count, gradient_norm, stopping = self._outcome
        return StepResult(number, loss, int(count), gradient_norm, time.perf_counter() - began, stopping)

    # ---- bodies

    def _forward(self, action: Action) -> None:
        microbatch = action.microbatches.start
        rows = share(self._batch.rows, self.microbatches, self.everyone.size, microbatch, self.everyone.index)
        # A rank without rows computes one that does not count: it must take part in every collective.
        counts = len(rows) > 0
        rows = rows if counts else range(1)
        inputs = {name: tensor.to(self.device) for name, tensor in self._batch(rows).items()}
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
            self._told = self._tell()
        self.placed.backward(output, last=last)

    def _tell(self) -> tuple[Work, Tensor]:
        """Begin to tell the other ranks what this step came to; it travels during the last backward."""
        mine = [self._sums.loss, self._sums.count, float(self.mesh.digest()), float(self._stop)]
        told = torch.tensor(mine, dtype=torch.float64, device=self.device)
        every = told.new_empty(self.everyone.size, len(mine))
        return self.everyone.all_gather(every, told, "control"), every

    def _update(self, action: Action) -> None:
        self.rule.finish()
        work, every = self._told
        work.wait()
        ranks = every.tolist()
        loss, count = self._agreed(ranks)
        gradient_norm = self._norm(count)
        factor = 1.0 / count
        if gradient_norm is not None:
            factor *= norm.coefficient(gradient_norm, self.optimizer.options.clip)
        self.optimizer.step(self.optimizer.rate(self._number), factor)
        self.placed.refresh()
        self._outcome = (loss / count, count, gradient_norm, any(rank[3] for rank in ranks))

    def _norm(self, count: float) -> float | None:
        """The norm of the whole gradient, if it is to be clipped."""
        options = self.optimizer.options
        if options.clip is None:
            return None
        order = float(options.clip_norm)
        # Shards are disjoint over z; over data they are the same.
        shares = self.mesh["z"].collect([self.placed.norm_share(order)])
        found = norm.total([share[0] for share in shares], order) / count
        if not math.isfinite(found):
            raise StepError(self._not_finite("gradient", [i for i, s in enumerate(shares) if not math.isfinite(s[0])]))
        return found

    def _not_finite(self, what: str, ranks: list[int]) -> str:
        return (
            f"step {self._number}: the {what} is not finite on rank {', '.join(map(str, ranks))}; nothing was updated. "
            "Lower optimizer.lr, set optimizer.clip, or look at this step's batch"
        )

    def _agreed(self, ranks: list[list[float]]) -> tuple[float, float]:
        """The global sums, once it is certain that all ranks did the same and that the numbers are numbers."""
        digests = [rank[2] for rank in ranks]
        if len(set(digests)) > 1:
            odd = [index for index, digest in enumerate(digests) if digests.count(digest) <= len(digests) // 2]
            raise StepError(
                f"step {self._number}: ranks {odd or list(range(len(digests)))} ran other collectives than the rest; "
                "expected every rank to run the same. Is there rank-dependent control flow in the model or the loss?"
            )
        broken = [index for index, rank in enumerate(ranks) if not math.isfinite(rank[0])]
        if broken:
            raise StepError(self._not_finite("loss", broken))
        loss, count = math.fsum(rank[0] for rank in ranks), math.fsum(rank[1] for rank in ranks)
        if count == 0:
            raise StepError(f"step {self._number}: no token counted on any rank; every target is ignored in this batch")
        return loss, count

    def forecast(self) -> Ledger:
        """The bytes that this rank will hand over in one step, by the formulas beside the code."""
        ledger = Ledger(rank=self.ledger.rank)
        self.placed.forecast(ledger, self.microbatches)
        sizes = [unit.arena.layout.trained for unit in self.placed.units if unit.arena.layout.trained]
        self.rule.forecast(ledger, sizes, self.placed.units[0].arena.gradient.element_size())
        size = self.everyone.size
        if size > 1:
            told = formulas.all_gather(size, size * _CONTROL * 8)
            ledger.send(self.everyone.name, "control", "all_gather", told)
        parts = self.mesh["z"].size
        if parts > 1 and self.optimizer.options.clip is not None:
            ledger.send("z", "control", "all_gather", formulas.all_gather(parts, parts * 8))
        return ledger
