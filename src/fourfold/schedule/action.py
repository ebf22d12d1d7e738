"""An action is a piece of work on one worker; a buffer is a value that actions read, write and free.

Actions name buffers logically, so that dependencies are data edges and never positions in a list. A transfer is *one*
action with two ends (`source` hands over, `worker` takes): one process performs it once, a rank its own end.
"""

from __future__ import annotations

from typing import NamedTuple

ANY = -1
"""A worker that the order leaves open: `bind` chooses."""

FORWARD, BACKWARD, UPDATE, MOVE = "forward", "backward", "update", "move"
REDUCE = "reduce"
"""Sums the gradients that one copy of a stage has made, where a stage has several copies."""
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward input", "backward weight"
"""The two halves of a backward that an order may run apart (zero bubble)."""
PREDICT = "predict"
"""Guesses from a stage's weight what some updates will make of it."""
RECOMPUTE = "recompute"
"""A forward once more, for what the first one did not keep."""
OFFLOAD, RELOAD = "offload", "reload"
"""Moves what a forward keeps to the worker's host and back."""
EVICT, LOAD = "evict", "load"
"""Moves what a forward keeps to another worker and back."""

ACTIVATION, ACTIVATION_GRADIENT = "activation", "activation-gradient"
GRADIENT, WEIGHT = "gradient", "weight"
PREDICTED = {FORWARD: "weight-predicted-forward", BACKWARD: "weight-predicted-backward"}
"""For one pass of one micro-batch; its version is the one that it guesses."""
GRADIENT_SUM = "gradient-sum"
"""Of one copy of a stage, named by the first of the micro-batches that it sums."""
STASH, DEFERRED = "stash", "deferred"
"""What a forward keeps for its backward, and what a backward of the input keeps for that of the weight."""
CHECKPOINT = "checkpoint"
"""What a forward keeps that will be recomputed: the input of its stage."""
HOST = "host"
"""A stash on the host: no memory of the device."""
ROOM = "room"
"""A token without bytes: the worker has room again for a stash that is away."""


class ScheduleError(ValueError):
    """A schedule that cannot run: says which action, where, what was expected and found."""


class Buffer(NamedTuple):
    """A value of the run.

    Attributes:
        kind: what it is: "activation" (what one stage gives the next), "stash" (what a forward keeps), "gradient", ...
        stage: the stage that it belongs to.
        microbatch: the micro-batch, or -1 for what outlives one (weights).
        version: how often the value was replaced: the weights of the step are version 0, the updated ones version 1.
    """

    kind: str
    stage: int
    microbatch: int = -1
    version: int = 0

    def __str__(self) -> str:
        words = f"{self.kind} of stage {self.stage}"
        words += f", micro-batch {self.microbatch}" if self.microbatch >= 0 else ""
        return words + (f", version {self.version}" if self.version else "")


class Action(NamedTuple):
    """One node of a program.

    Attributes:
        kind: selects the body that a machine runs.
        stage: the stage that it works on.
        microbatches: the micro-batches that it covers.
        worker: who runs it (a coordinate of `pipe`, or a member of a pool), or ANY. Of a move: who receives.
        lane: actions of one worker and lane run one after the other, in the order's order.
        reads: buffers that must be there before it starts.
        writes: buffers that are there when it is done; each buffer is written once.
        frees: buffers that are gone when it is done. (What no action frees on a worker goes after its last read there.)
        source: of a move only, the worker that hands over.
    """

    kind: str
    stage: int
    microbatches: range
    worker: int = ANY
    lane: str = "compute"
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    frees: tuple[Buffer, ...] = ()
    source: int | None = None

    @property
    def where(self) -> int:
        """The worker whose buffers it reads and frees."""
        return self.worker if self.source is None else self.source

    def __str__(self) -> str:
        if self.source is not None:
            return f"{self.kind} of {self.reads[0]} from worker {self.source} to worker {self.worker}"
        low, high = self.microbatches[0], self.microbatches[-1]
        batches = f"micro-batch {low}" if low == high else f"micro-batches {low}-{high}"
        return f"{self.kind} of stage {self.stage}, {batches}" + (
            "" if self.worker == ANY else f", worker {self.worker}"
        )
