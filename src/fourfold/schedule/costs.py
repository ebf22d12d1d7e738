"""What a schedule's actions cost, where nothing has been traced or measured: a few numbers for all stages alike."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.schedule.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    EVICT,
    FORWARD,
    LOAD,
    MOVE,
    OFFLOAD,
    RECOMPUTE,
    RELOAD,
    Action,
)


@dataclass(frozen=True)
class Costs:
    """Seconds of each kind of action on one stage and micro-batch.

    Attributes:
        forward, backward_input, backward_weight: a whole backward takes the sum of its halves, a recompute a forward.
        move: from one worker to another.
        update: of a stage.
        copy: of what one forward keeps, to the host, to another worker, or back.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    move: float = 0.0
    update: float = 0.0
    copy: float = 0.0

    def __call__(self, action: Action) -> float:
        """Seconds of an action; kinds of an order's own take none."""
        seconds = {
            FORWARD: self.forward,
            RECOMPUTE: self.forward,
            BACKWARD: self.backward_input + self.backward_weight,
            BACKWARD_INPUT: self.backward_input,
            BACKWARD_WEIGHT: self.backward_weight,
            MOVE: self.move,
            **dict.fromkeys((OFFLOAD, RELOAD, EVICT, LOAD), self.copy),
        }
        return seconds.get(action.kind, self.update if action.kind == "update" else 0.0)
