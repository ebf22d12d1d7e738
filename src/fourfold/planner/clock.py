"""The time of a step: operators by a roofline, collectives by closed forms, and a lane for each.

A forecast of time is an interval. Its two ends are the same simulation under two sets of assumptions; the measured
profile of a machine narrows it, a data sheet alone does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fourfold.hardware import Cluster
from fourfold.hardware.collectives import Group, seconds
from fourfold.placement.traffic import Exchange
from fourfold.plan import Placement
from fourfold.planner.memory import Parcel
from fourfold.planner.recorder import FORWARD
from fourfold.planner.tap import span
from fourfold.planner.tape import Event, Tape

UPDATE_BYTES = 7
"""Elements read and written a weight by an update with two moments: weight, gradient and moments in, all but the
gradient out."""


EVERYONE = "z+data"
"""The axis of batch norms' statistics, which are waited for where they are needed."""


@dataclass(frozen=True)
class Assumptions:
    """What a data sheet does not say.

    Attributes:
        gemm: factor on the share of the peak that the device's large products reach.
        memory: share of the memory bandwidth that elementwise operators reach.
        link: factor on the bandwidth of collectives.
        slowdown: compute that runs beside communication takes this much longer (Galvatron ships 1.126 and documents
            1.1 to 1.3).
        launch: seconds that every operator costs at least.
    """

    gemm: float = 1.0
    memory: float = 0.8
    link: float = 1.0
    slowdown: float = 1.126
    launch: float = 4e-6


BEST = Assumptions(gemm=1.2, memory=0.95, link=1.2, slowdown=1.0, launch=2e-6)
LIKELY = Assumptions()
WORST = Assumptions(gemm=0.75, memory=0.5, link=0.6, slowdown=1.3, launch=1e-5)


@dataclass
class Timing:
    """Seconds of one step on one rank.

    Attributes:
        compute: forward and backward.
        update: the optimizer.
        exposed: by axis, waiting for communication that nothing hid.
        hidden: by axis, communication beside compute.
        stretched: what compute lost to communication beside it.
    """

    compute: float = 0.0
    update: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)
    stretched: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.update + sum(self.exposed.values()) + self.stretched


def operator_seconds(tape: Tape, cluster: Cluster, dtype: str, assume: Assumptions) -> list[float]:
    """Each operator of a tape: the slower of its products and its traffic, never less than a launch."""
    device = cluster.device
    peak = device.peak(dtype) * min(1.0, device.efficiency * assume.gemm)
    bandwidth = device.memory_bandwidth * assume.memory
    return [max(operator["flops"] / peak, operator["bytes"] / bandwidth, assume.launch) for operator in tape.operators]


def flops(tape: Tape) -> int:
    """Floating-point operations of one micro-batch, forward and backward, recomputation included."""
    total = 0
    for segment in tape.segments:
        numbers = Counter(event.number for event in segment.events if event.kind == "op")
        total += sum(tape.operators[number]["flops"] * times for number, times in numbers.items())
    return total


class Clock:
    """Two lanes, compute and wire; the wire carries one collective at a time, in the order of their issue.

    Sums over x and y, for which the model waits soon, go before what travels in the background.
    """

    def __init__(
        self,
        tape: Tape,
        parcels: Sequence[Parcel],
        placement: Placement,
        cluster: Cluster,
        *,
        dtype: str,
        microbatches: int,
        states: int,
        assume: Assumptions = LIKELY,
        exchanges: Sequence[Exchange] = (),
    ):
        self.tape, self.parcels, self.placement, self.cluster = tape, parcels, placement, cluster
        self.microbatches, self.states, self.assume = microbatches, states, assume
        self.costs = operator_seconds(tape, cluster, dtype, assume)
        self.sizes = placement.axes()
        self.exchanges = exchanges
        self.said: dict[int, tuple[str, float]] = {}
        self.front = 0.0
        self.home = {place: number for number, parcel in enumerate(parcels) for place in parcel.places}
        self.blocks = sorted(self.home)
        self.timing = Timing()
        self.now = self.free = 0.0
        self.busy: dict[str, float] = {}
        self.arrives: dict[int, float] = {}
        self.live: set[int] = set()
        self.sums: list[tuple[str, float]] = []
        self.speaks = [any(event.kind == "send" for event in segment.events) for segment in tape.segments]

    def run(self) -> Timing:
        """Simulate one step."""
        for number in range(self.microbatches):
            self._microbatch(last=number == self.microbatches - 1)
        for axis, finish in self.sums:
            self._wait(axis, finish)
        self._update()
        waited = self.timing.exposed
        self.timing.hidden = {axis: max(0.0, busy - waited.get(axis, 0.0)) for axis, busy in self.busy.items()}
        self.timing.stretched = (self.assume.slowdown - 1) * min(sum(self.timing.hidden.values()), self.timing.compute)
        return self.timing

    # ---- lanes

    def _compute(self, duration: float) -> None:
        self.now += duration
        self.timing.compute += duration

    def _issue(self, axis: str, op: str, nbytes: float) -> float:
        """Put a collective on the wire; returns when it is complete."""
        duration = self._takes(axis, op, nbytes)
        self.free = max(self.free, self.now) + duration
        if not self.placement.overlap:
            self._wait(axis, self.free)
        return self.free

    def _takes(self, axis: str, op: str, nbytes: float) -> float:
        size, stride = span(axis, self.sizes)
        duration = seconds(op, nbytes, self.cluster, Group.of(self.cluster, size, stride)) / self.assume.link
        self.busy[axis] = self.busy.get(axis, 0.0) + duration
        return duration

    def _say(self, number: int) -> None:
        """A message over x or y goes first: what is in the background is delayed by as much."""
        message = self.tape.messages[number]
        duration = self._takes(message.axis, message.op, message.whole(self.sizes))
        began = max(self.now, self.front)
        self.front = began + duration
        self.said[number] = message.axis, self.front
        self.free = max(self.free, began) + duration
        for unit, arrives in self.arrives.items():
            self.arrives[unit] = arrives + duration if arrives > began else arrives
        self.sums = [(axis, ends + duration if ends > began else ends) for axis, ends in self.sums]
        if not self.placement.overlap:
            self._wait(*self.said[number])

    def _wait(self, axis: str, finish: float) -> None:
        if finish > self.now:
            self.timing.exposed[axis] = self.timing.exposed.get(axis, 0.0) + finish - self.now
            self.now = finish

    def _copy(self, nbytes: float) -> None:
        self._compute(2 * nbytes / (self.cluster.device.memory_bandwidth * self.assume.memory))

    # ---- a micro-batch

    def _microbatch(self, *, last: bool) -> None:
        waiting = set(range(len(self.parcels)))
        for number, parcel in enumerate(self.parcels):
            if not parcel.places:
                self._gather(number)
        for number, parcel in enumerate(self.parcels):
            if not parcel.places:
                self._ready(number)
        for segment, speaks in zip(self.tape.segments, self.speaks, strict=True):
            unit = self.home.get(segment.place)
            forward = segment.phase == FORWARD
            if unit is not None:
                self._ready(unit)
                self._ahead(segment.place, 1 if forward else -1)
            if speaks:
                self._converse(segment.events)
            else:
                self._compute(sum(self.costs[event.number] for event in segment.events if event.kind == "op"))
            if unit is not None and forward and segment.place != self.blocks[-1]:
                self.live.discard(unit)
            if unit is not None and not forward and segment.place == min(self.parcels[unit].places):
                self.live.discard(unit)
                self._depart({number for number in waiting if number >= unit}, waiting, last)
        self._depart(set(waiting), waiting, last)
        self.live.clear()
        for exchange in self.exchanges:
            for _ in range(exchange.calls):
                self._wait(EVERYONE, self._issue(EVERYONE, exchange.op, exchange.nbytes))

    def _converse(self, events: Sequence[Event]) -> None:
        """Operators, and messages over x and y as they are sent and waited for between them."""
        for event in events:
            if event.kind == "op":
                self._compute(self.costs[event.number])
            elif event.kind == "send":
                self._say(event.number)
            elif event.kind == "wait":
                self._wait(*self.said.pop(event.number))

    def _ahead(self, place: int, step: int) -> None:
        unit = self.home.get(place + step)
        if not self.placement.overlap or unit is None or unit == self.home[place]:
            return
        if step > 0 or self.parcels[unit].reached:
            self._gather(unit)

    def _gather(self, unit: int) -> None:
        parcel = self.parcels[unit]
        if parcel.resident or unit in self.live:
            return
        self.live.add(unit)
        self.arrives[unit] = self._issue("z", "all_gather", parcel.layout.gathered * parcel.message)

    def _ready(self, unit: int) -> None:
        if self.parcels[unit].resident:
            return
        self._gather(unit)
        if unit in self.arrives:
            self._wait("z", self.arrives.pop(unit))
            self._copy(self.parcels[unit].full)

    def _depart(self, leaving: set[int], waiting: set[int], last: bool) -> None:
        for unit in sorted(leaving, reverse=True):
            waiting.discard(unit)
            parcel = self.parcels[unit]
            if not parcel.layout.trained:
                continue
            whole = parcel.layout.trained * parcel.layout.parts
            self._copy(whole * parcel.message)
            if parcel.layout.parts > 1 and (last or not parcel.hold):
                self.sums.append(("z", self._issue("z", "reduce_scatter", whole * parcel.message)))
            if last and self.placement.data > 1:
                nbytes = parcel.layout.trained * parcel.master
                self.sums.append(("data", self._issue("data", "all_reduce", nbytes)))

    def _update(self) -> None:
        elements = sum(parcel.layout.trained * parcel.master for parcel in self.parcels)
        touched = elements * (UPDATE_BYTES if self.states == 2 else 3 + 2 * self.states)
        self.timing.update = touched / (self.cluster.device.memory_bandwidth * self.assume.memory)
        self.now += self.timing.update
        for parcel in self.parcels:
            if parcel.resident and parcel.layout.parts > 1 and parcel.layout.trained:
                nbytes = parcel.layout.trained * parcel.layout.parts * parcel.message
                self._wait("z", self._issue("z", "all_gather", nbytes))
