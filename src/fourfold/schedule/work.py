"""The pieces of work that orders are made of, each with the buffers that it reads, writes and frees.

An order says who runs what, and in which sequence; what a piece needs is the same in all of them:

- forward reads the weight and the activation of the stage before; writes its stash and, for the next stage, its own.
- backward reads weight, stash and the gradient of its activation; writes the weight's gradient and that of what it was
  given; frees the stash.
- backward input does the same, but writes, instead of the weight's gradient, what is deferred;
- backward weight makes the weight's gradient of that, and frees it.
- update reads the weight and all gradients, frees them, and writes the weight's next version.

Where a stage lives on several workers, each copy runs a share of the micro-batches: a reduce sums the gradients of one
share, and the update of every copy reads all sums, in the same sequence, so that the copies stay equal to the bit.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from fourfold.schedule.action import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    DEFERRED,
    FORWARD,
    GRADIENT,
    GRADIENT_SUM,
    REDUCE,
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


def piece_of(action: Action) -> Piece:
    """What an action of one micro-batch is a piece of."""
    return action.kind, action.stage, action.microbatches.start


def inputs(piece: Piece, last: int) -> tuple[Piece, ...]:
    """The pieces whose buffers a piece reads; `last` is the last stage."""
    kind, stage, microbatch = piece
    if kind == F:
        return ((F, stage - 1, microbatch),) if stage else ()
    if kind == W:
        return ((I, stage, microbatch),)
    own = (F, stage, microbatch)
    return (own,) if stage == last else (own, (kind, stage + 1, microbatch))


def in_turn(passes: Iterable[tuple[str, int]]) -> Iterator[Piece]:
    """Give every (kind, stage) its micro-batch.

    A stage's forwards count up from 0, so do its backwards, whole or of the input; a backward of the weight takes the
    oldest that the stage has deferred.
    """
    counts: Counter[tuple[bool, int]] = Counter()
    deferred: defaultdict[int, deque[int]] = defaultdict(deque)
    for kind, stage in passes:
        if kind == W:
            yield W, stage, deferred[stage].popleft()
            continue
        microbatch = counts[kind == F, stage]
        counts[kind == F, stage] += 1
        if kind == I:
            deferred[stage].append(microbatch)
        yield kind, stage, microbatch


class Work:
    """Makes the actions of one shape.

    A piece's `version` is that of the weight it reads: 0 is the one that the step begins with.
    """

    def __init__(self, shape: Shape) -> None:
        self.last = shape.stages - 1
        self.microbatches = range(shape.microbatches)
        self._make = {F: self.forward, B: self.backward, I: self.backward_input, W: self.backward_weight}

    def piece(self, kind: str, stage: int, microbatch: int, worker: int, version: int = 0) -> Action:
        """A forward, a backward or a half of one, of one micro-batch."""
        return self._make[kind](stage, microbatch, worker, version)

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

    def update(
        self,
        stage: int,
        worker: int,
        microbatches: range | None = None,
        version: int = 0,
        shares: Sequence[range] = (),
    ) -> Action:
        """The optimizer's step on a stage, from the gradients of these micro-batches (None: of all).

        Where the stage has a copy for each of several `shares` of the micro-batches, from the shares' sums.
        """
        batches = self.microbatches if microbatches is None else microbatches
        old, new = Buffer(WEIGHT, stage, -1, version), Buffer(WEIGHT, stage, -1, version + 1)
        gradients = [Buffer(GRADIENT, stage, microbatch) for microbatch in batches]
        sums = [Buffer(GRADIENT_SUM, stage, share.start) for share in shares]
        used = (old, *(sums or gradients))
        return Action(UPDATE, stage, batches, worker, "compute", used, (new,), used)

    def reduce(self, stage: int, worker: int, share: range) -> Action:
        """The sum of the gradients that one copy of a stage has made, for the updates of all copies."""
        given = tuple(Buffer(GRADIENT, stage, microbatch) for microbatch in share)
        return Action(
            REDUCE, stage, share, worker, "compute", given, (Buffer(GRADIENT_SUM, stage, share.start),), given
        )

    def laid(self, worker: int, pieces: Iterable[Piece], shares: Sequence[range] = ()) -> Iterator[Action]:
        """A worker's pieces, and then the updates of its stages in the sequence in which they are complete.

        Args:
            worker: who runs them.
            pieces: of the stages that live on the worker.
            shares: where every stage has copies, the micro-batches of each; a copy's gradients are summed, and on
                their way to the other copies, as soon as its last backward is done.
        """
        done: dict[int, int] = {}
        for kind, stage, microbatch in pieces:
            yield self.piece(kind, stage, microbatch, worker)
            if kind in (B, W):
                done[stage] = done.pop(stage, 0) + 1
                for share in shares:
                    if microbatch in share and done[stage] == len(share):
                        yield self.reduce(stage, worker, share)
        for stage in done:
            yield self.update(stage, worker, shares=shares)

    def _back(self, stage: int, microbatch: int, version: int) -> tuple[Buffer, tuple[Buffer, ...], tuple[Buffer, ...]]:
        stash = Buffer(STASH, stage, microbatch)
        reads = (Buffer(WEIGHT, stage, -1, version), stash)
        if stage != self.last:
            reads = (*reads, Buffer(ACTIVATION_GRADIENT, stage + 1, microbatch))
        return stash, reads, (Buffer(ACTIVATION_GRADIENT, stage, microbatch),) if stage else ()
