"""The tables of a report, as numbers: step time split, bytes matrix, memory, forecast beside measurement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fourfold.ledger import Difference, Flow, Ledger, Traffic
from fourfold.ledger.ledger import MEMORY, Span

RESTING = ("parameters", "optimizer")
"""Categories that a run knows to the byte; the rest of its peak is measured as one number."""
REST = "gradients, activations and buffers"
PEAK = "peak"


@dataclass(frozen=True)
class Split:
    """Where the time of a rank's recorded steps went, in seconds a step.

    Attributes:
        rank: whose.
        steps: how many were recorded.
        seconds: of one step, mean.
        parts: "compute", "exposed z" (an axis), "data", "idle"; they add up to `seconds`.
    """

    rank: int
    steps: int
    seconds: float
    parts: dict[str, float]


def split(ledger: Ledger) -> Split | None:
    """The split of a rank's recorded steps; None if none was recorded.

    Exposed communication is the time in which the rank was blocked in a collective. Idle is the time of a step in which
    the schedule ran nothing, where it recorded what it ran; compute is the rest.
    """
    steps = _steps(ledger)
    if not steps:
        return None
    total = sum(span.end - span.start for span in steps)
    parts: defaultdict[str, float] = defaultdict(float)
    for axis, span in _collectives(ledger, steps):
        parts[f"exposed {axis}"] += span.args.get("exposed", 0)
    parts["data"] = sum(span.end - span.start for span in ledger.spans if span.lane == "data")
    ran = sum(span.end - span.start for span in ledger.spans if span.lane == "compute")
    parts["idle"] = max(0, total - ran) if ran else 0
    parts["compute"] = total - sum(parts.values())
    names = ["compute", *sorted(name for name in parts if name.startswith("exposed")), "data", "idle"]
    scaled = {name: parts[name] / len(steps) / 1e9 for name in names}
    return Split(ledger.rank, len(steps), total / len(steps) / 1e9, scaled)


@dataclass(frozen=True)
class Hiding:
    """How much of a flow's time under way a rank went on computing, in a mean step of a mean rank.

    Attributes:
        flow: which collectives.
        calls: a step.
        seconds: from issue until the results were seen to be there; what travels side by side counts each for itself.
        exposed: of these, the rank was blocked.
    """

    flow: Flow
    calls: float
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        """The share of the time under way that was hidden behind other work, 0 to 1."""
        return 1 - self.exposed / self.seconds if self.seconds else 0.0


def hiding(ledgers: Mapping[int, Ledger]) -> list[Hiding]:
    """Every flow of the recorded steps; those that blocked longest first."""
    sums: defaultdict[Flow, list[int]] = defaultdict(lambda: [0, 0, 0])
    steps = 0
    for ledger in ledgers.values():
        recorded = _steps(ledger)
        steps += len(recorded)
        for axis, span in _collectives(ledger, recorded):
            total = sums[Flow(axis, span.args.get("kind", ""), span.name)]
            for place, value in enumerate((1, span.end - span.start, span.args.get("exposed", 0))):
                total[place] += value
    found = [
        Hiding(flow, calls / steps, time / steps / 1e9, exposed / steps / 1e9)
        for flow, (calls, time, exposed) in sums.items()
    ]
    return sorted(found, key=lambda one: (-one.exposed, one.flow))


@dataclass(frozen=True)
class Row:
    """One flow of the bytes matrix, in one step of rank 0, and over all ranks.

    Attributes:
        predicted: None without a forecast.
        total: bytes of all ranks together.
    """

    flow: Flow
    calls: int
    predicted: int | None
    measured: int
    total: int

    @property
    def equal(self) -> bool | None:
        """Measured is predicted, exactly; None without a forecast."""
        return None if self.predicted is None else self.predicted == self.measured


def matrix(ledgers: Mapping[int, Ledger], forecast: Ledger | None) -> list[Row]:
    """The bytes matrix of the last step."""
    if not ledgers:
        return []
    first = ledgers[min(ledgers)]
    mine = first.traffic(last_step(first))
    predicted = forecast.traffic() if forecast else {}
    everyone = [ledger.traffic(last_step(ledger)) for ledger in ledgers.values()]
    rows = []
    for flow in sorted(mine.keys() | predicted.keys()):
        found = mine.get(flow, Traffic())
        total = sum(flows.get(flow, Traffic()).bytes for flows in everyone)
        told = predicted.get(flow, Traffic()).bytes if forecast else None
        rows.append(Row(flow, found.calls, told, found.bytes, total))
    return rows


def memory(ledgers: Mapping[int, Ledger], forecast: Ledger | None) -> dict[str, list[int | None]]:
    """Peak bytes by category: one number a rank, in rank order, then the forecast (None: not recorded).

    Where a peak was measured, what a run cannot tell apart is one row, in the forecast too, and the rows add up to the
    last one, the peak.
    """
    columns = [*(ledgers[rank] for rank in sorted(ledgers)), forecast]
    if any(_told(ledger) for ledger in ledgers.values()):
        columns = [_folded(ledger) if ledger else None for ledger in columns]
    known = {category for ledger in columns if ledger for category in ledger.memory}
    order = [*(category for category in MEMORY if category in known), *sorted(known - set(MEMORY))]
    return {category: [ledger.memory.get(category) if ledger else None for ledger in columns] for category in order}


def comparison(
    ledgers: Mapping[int, Ledger], forecast: Ledger | None, seconds: float | None = None
) -> list[Difference]:
    """Forecast minus measurement of rank 0; memory and scalars only where both sides have them.

    Args:
        ledgers: measured, by rank.
        forecast: of one step.
        seconds: of a typical step; None: those of the ledger, which are the last step's.
    """
    if forecast is None or not ledgers:
        return []
    measured = ledgers[min(ledgers)]
    mine, theirs = (forecast, measured) if not _told(measured) else (_folded(forecast), _folded(measured))
    both = mine.memory.keys() & theirs.memory.keys()
    mine = replace(mine, memory={category: mine.memory[category] for category in both})
    theirs = replace(theirs, step=last_step(theirs), memory={category: theirs.memory[category] for category in both})
    if seconds is not None:
        theirs = replace(theirs, notes={**theirs.notes, "step seconds": seconds})
    return mine - theirs


def _steps(ledger: Ledger) -> list[Span]:
    """The recorded steps."""
    return [span for span in ledger.spans if span.lane == "step"]


def _collectives(ledger: Ledger, steps: Sequence[Span]) -> Iterator[tuple[str, Span]]:
    """(axis, collective) of everything that ended in one of these steps."""
    for span in ledger.spans:
        if span.lane.startswith("wire:") and any(step.start <= span.end <= step.end for step in steps):
            yield span.lane.removeprefix("wire:"), span


def _told(ledger: Ledger) -> bool:
    """The ledger knows its peak, and the categories that rest."""
    return "memory peak" in ledger.notes and all(category in ledger.memory for category in RESTING)


def _folded(ledger: Ledger) -> Ledger:
    """The same ledger with the categories of its memory that a run cannot tell apart put together, and its peak."""
    if not _told(ledger):
        return ledger
    resting = {category: ledger.memory[category] for category in RESTING}
    peak = round(ledger.notes["memory peak"])
    notes = {note: value for note, value in ledger.notes.items() if note != "memory peak"}
    return replace(ledger, memory={**resting, REST: peak - sum(resting.values()), PEAK: peak}, notes=notes)


def last_step(ledger: Ledger) -> int:
    """The last optimizer step that was counted; what belongs to no step is counted under -1."""
    return max((step for step in ledger.steps if step >= 0), default=-1)
