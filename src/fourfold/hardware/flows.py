"""Ring collectives message by message over shared links, in virtual time: what the closed forms of `sharing` shorten.

Every rank of a ring sends one chunk a step to its follower, and begins a step when it has sent and received the chunks
of the step before. Messages under way at the same moment share links max-min fairly: a device's way out and way in
inside its node, and the ports of a node, out and in. Bytes, seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.hardware.cluster import Cluster
from fourfold.hardware.collectives import EFFICIENCY
from fourfold.hardware.sharing import Span

Resource = tuple[str, int]
STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Rounds of n-1 steps."""


@dataclass(eq=False)
class Message:
    """A chunk under way.

    Attributes:
        source: the sending rank.
        target: the receiving rank.
        left: bytes still to go.
        uses: the links that it occupies.
    """

    source: int
    target: int
    left: float
    uses: tuple[Resource, ...]


def ring_time(op: str, nbytes: float, cluster: Cluster, span: Span) -> float:
    """Seconds until every group of the axis has done its ring collective, all begun at once.

    Args:
        op: all_reduce, all_gather, reduce_scatter or all_to_all (which hands over as much).
        nbytes: the whole tensor of one group.
    """
    steps = STEPS[op] * (span.size - 1)
    if not steps or not nbytes:
        return 0.0
    return Rings(cluster, span, nbytes / span.size, steps).run()


class Rings:
    """All rings of an axis, each rank with `steps` chunks to send."""

    def __init__(self, cluster: Cluster, span: Span, chunk: float, steps: int):
        self.cluster, self.span, self.chunk, self.steps = cluster, span, chunk, steps
        self.devices = cluster.devices_per_node
        self.sent, self.received = [0] * span.world, [0] * span.world
        self.together = max(1, min(span.size, self.devices // span.stride))

    def run(self) -> float:
        """Let the messages go until all have arrived."""
        now, moving = 0.0, [self._message(rank) for rank in range(self.span.world)]
        crosses = any(one.uses[0][0] == "node out" for one in moving)
        while moving:
            rates = self.fair(moving)
            passed = min(one.left / rate for one, rate in zip(moving, rates, strict=True))
            now += passed
            for one, rate in zip(moving, rates, strict=True):
                one.left -= rate * passed
            done = [one for one in moving if one.left <= 1e-9 * self.chunk]
            moving = [one for one in moving if one.left > 1e-9 * self.chunk] + self._next(done, moving)
        link = self.cluster.inter if crosses else self.cluster.intra
        return now + self.steps * link.latency + link.call

    def fair(self, moving: Sequence[Message]) -> list[float]:
        """Max-min fair rates: the tightest link shares itself evenly, then the next what is left of it."""
        rates: dict[Message, float] = {}
        room = {use: self._capacity(use) for one in moving for use in one.uses}
        while len(rates) < len(moving):
            waiting = [one for one in moving if one not in rates]
            load = Counter(use for one in waiting for use in one.uses)
            tightest = min(load, key=lambda use: room[use] / load[use])
            share = room[tightest] / load[tightest]
            for one in waiting:
                if tightest in one.uses:
                    rates[one] = share
                    for use in one.uses:
                        room[use] -= share
        return [rates[one] for one in moving]

    def _next(self, done: Sequence[Message], moving: Sequence[Message]) -> list[Message]:
        """What may leave now that these have arrived."""
        busy = {one.source for one in moving} - {one.source for one in done}
        for one in done:
            self.sent[one.source] += 1
            self.received[one.target] += 1
        ready = {rank for one in done for rank in (one.source, one.target)} - busy
        return [self._message(rank) for rank in sorted(ready) if self.sent[rank] < self.steps and self._may(rank)]

    def _may(self, rank: int) -> bool:
        return self.received[rank] >= self.sent[rank]

    def _message(self, rank: int) -> Message:
        size, stride = self.span.size, self.span.stride
        target = rank + stride if rank // stride % size < size - 1 else rank - (size - 1) * stride
        start, end = rank // self.devices, target // self.devices
        if start == end:
            return Message(rank, target, self.chunk, (("device out", rank), ("device in", target)))
        return Message(rank, target, self.chunk, (("node out", start), ("node in", end)))

    def _capacity(self, use: Resource) -> float:
        nominal = self.cluster.intra.among(self.together)
        return EFFICIENCY * (self.cluster.node_bandwidth if use[0].startswith("node") else nominal)
