"""What happens inside one action: lanes, seconds and bytes, as placement describes them to the simulator.

Inside an action belongs to placement (weight gathers, the sums of a tensor grid), between actions to the schedule: as
actions, the collectives inside blocks would turn 10^5 nodes into 10^7.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple


class Part(NamedTuple):
    """A stretch of one lane.

    Attributes:
        lane: "compute", "wire:z", ...; parts of one lane run in list order.
        name: what it is.
        seconds: how long it takes.
        bytes: what it hands to the network.
        after: indices of earlier parts that must be done before it starts.
    """

    lane: str
    name: str
    seconds: float
    bytes: int = 0
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Template:
    """The parts of one action, in an order in which each follows what it waits for."""

    parts: tuple[Part, ...]

    def ends(self) -> list[float]:
        """When each part ends, in seconds after the action's start."""
        free: defaultdict[str, float] = defaultdict(float)
        ends: list[float] = []
        for part in self.parts:
            start = max([free[part.lane], *(ends[other] for other in part.after)])
            ends.append(start + part.seconds)
            free[part.lane] = ends[-1]
        return ends

    @property
    def seconds(self) -> float:
        """How long the action takes."""
        return max(self.ends(), default=0.0)

    @property
    def bytes(self) -> int:
        """What the action hands to the network."""
        return sum(part.bytes for part in self.parts)

    def exposed(self, lane: str = "compute") -> float:
        """Seconds of the action in which `lane` does nothing: what waiting for the other lanes costs."""
        return self.seconds - sum(part.seconds for part in self.parts if part.lane == lane)
