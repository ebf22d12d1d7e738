"""The pieces of work that orders are made of, each with the buffers that it reads, writes and frees.

An order says who runs what, and in which sequence; what a piece needs is the same in all of them:

- forward reads the weight and the activation of the stage before; writes its stash and, for the next stage, its own.
- backward reads weight, stash and the gradient of its activation; writes the weight's gradient and that of what it was
  given; frees the stash.
- backward input does the same, but writes, instead of the weight's gradient, what is deferred;
- backward weight makes the weight's gradient of that, and frees it.
- update reads the weight and all gradients, frees them, and writes the weight's next version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fourfold.schedule.action import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    DEFERRED,
    FORWARD,
    GRADIENT,
    STASH,
    UPDATE,
    WEIGHT,
    Action,
    Buffer,
)
from fourfold.schedule.order import Shape

F, B, I, W = FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT  # noqa: E741 (the field's letters)
Piece = tuple[str, int, int]
"""(kind, stage, micro-batch)."""


class Work:
    """Makes the actions of one shape.

    A piece's `version` is that of the weight it reads: 0 is the one that the step begins with.
    """

    def __init__(self, shape: Shape) -> None:
        self.last = shape.stages - 1
        self.microbatches = range(shape.microbatches)

    def piece(self, kind: str, stage: int, microbatch: int, worker: int, version: int = 0) -> Action:
        """A forward, a backward or a half of one, of one micro-batch."""
        make = {F: self.forward, B: self.backward, I: self.backward_input, W: self.backward_weight}[kind]
        return make(stage, microbatch, worker, version)

    def forward(self, stage: int, microbatch: int, worker: int, version: int = 0) -> Action:
        """Forward of a stage; the last one's ends in the loss and gives nothing away."""
        weight, stash = Buffer(WEIGHT, stage, -1, version), Buffer(STASH, stage, microbatch)
        reads = (weight, Buffer(ACTIVATION, stage - 1, microbatch)) if stage else (weight,)
        writes = (stash,) if stage == self.last else (stash, Buffer(ACTIVATION, stage, microbatch))
        return Action(FORWARD, stage, range(microbatch, microbatch + 1), worker, "compute", reads, writes)

    def backward(self, stage: int, microbatch: int, worker: int, version: int = 0) -> Action:
        """Backward of a stage, whole."""
        stash, reads, writes = self._back(stage, microbatch, version)
        writes = (Buffer(GRADIENT, stage, microbatch), *writes)
        return Action(BACKWARD, stage, range(microbatch, microbatch + 1), worker, "compute", reads, writes, (stash,))

    def backward_input(self, stage: int, microbatch: int, worker: int, version: int = 0) -> Action:
        """The half of a backward that other stages wait for."""
        stash, reads, writes = self._back(stage, microbatch, version)
        writes = (Buffer(DEFERRED, stage, microbatch), *writes)
        kind, batches = BACKWARD_INPUT, range(microbatch, microbatch + 1)
        return Action(kind, stage, batches, worker, "compute", reads, writes, (stash,))

    def backward_weight(self, stage: int, microbatch: int, worker: int, version: int = 0) -> Action:
        """The half of a backward that nobody waits for until the update."""
        del version  # products of what was kept: the weight takes no part
        deferred = (Buffer(DEFERRED, stage, microbatch),)
        writes, batches = (Buffer(GRADIENT, stage, microbatch),), range(microbatch, microbatch + 1)
        return Action(BACKWARD_WEIGHT, stage, batches, worker, "compute", deferred, writes, deferred)

    def update(self, stage: int, worker: int, microbatches: range | None = None, version: int = 0) -> Action:
        """The optimizer's step on a stage, from the gradients of these micro-batches (None: of all)."""
        batches = self.microbatches if microbatches is None else microbatches
        old, new = Buffer(WEIGHT, stage, -1, version), Buffer(WEIGHT, stage, -1, version + 1)
        used = (old, *(Buffer(GRADIENT, stage, microbatch) for microbatch in batches))
        return Action(UPDATE, stage, batches, worker, "compute", used, (new,), used)

    def laid(self, worker: int, pieces: Iterable[Piece]) -> Iterator[Action]:
        """A worker's pieces, and then the updates of its stages in the sequence in which they are complete."""
        done: dict[int, None] = {}
        for kind, stage, microbatch in pieces:
            if kind in (B, W):
                done.pop(stage, None)
                done[stage] = None
            yield self.piece(kind, stage, microbatch, worker)
        for stage in done:
            yield self.update(stage, worker)

    def _back(self, stage: int, microbatch: int, version: int) -> tuple[Buffer, tuple[Buffer, ...], tuple[Buffer, ...]]:
        stash = Buffer(STASH, stage, microbatch)
        reads = (Buffer(WEIGHT, stage, -1, version), stash)
        if stage != self.last:
            reads = (*reads, Buffer(ACTIVATION_GRADIENT, stage + 1, microbatch))
        return stash, reads, (Buffer(ACTIVATION_GRADIENT, stage, microbatch),) if stage else ()
