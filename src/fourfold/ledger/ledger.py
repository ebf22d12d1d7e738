"""Spans of time, bytes on the wire and memory by category: a forecast and a measurement are both a `Ledger`.

Because they are the same type, `forecast - measurement` is a table, and every figure that fourfold predicts
can be printed beside the figure that it measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KINDS = ("gradient", "weight", "activation", "activation-gradient", "embedding", "control")
"""What a byte is for. Every collective names one of these."""

MEMORY = ("parameters", "gradients", "optimizer", "activations", "gather buffers", "kernel workspace", "other")
"""Where a byte rests. Forecast and measurement use the same categories."""

KEPT = 1000
"""Steps whose traffic a ledger keeps one by one; of earlier ones it keeps the sum, so that it does not grow."""


class Flow(NamedTuple):
    """One line of the bytes matrix: traffic of one kind, over one mesh axis, by one operation."""

    axis: str
    kind: str
    op: str


@dataclass
class Traffic:
    """How often a flow ran, and the bytes that this rank handed to the network for it."""

    calls: int = 0
    bytes: int = 0


class Span(NamedTuple):
    """A stretch of time on one lane ("compute", "data", "wire:z", ...), in nanoseconds of one clock."""

    lane: str
    name: str
    start: int
    end: int
    args: dict[str, Any]


class Difference(NamedTuple):
    """One row of `forecast - measurement`. `error` is relative to the measurement, or None where that is zero."""

    what: str
    forecast: float
    measured: float
    error: float | None


@dataclass
class Ledger:
    """The record of one rank. Spans are kept only while `recording`; memory as peaks in bytes.

    Traffic is kept per step for the last `KEPT` steps, and summed in `earlier` for those before. What belongs to no
    step (counted under a negative number) stays apart.
    """

    rank: int = 0
    step: int = 0
    recording: bool = False
    steps: dict[int, dict[Flow, Traffic]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)
    """Scalars that belong to a run: "flops", "step seconds", "tokens"."""
    earlier: dict[Flow, Traffic] = field(default_factory=dict)
    _flows: dict[Flow, Traffic] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._flows = self.steps.setdefault(self.step, {})

    def begin(self, step: int) -> None:
        """What is counted from here on belongs to `step`."""
        self.step = step
        self._flows = self.steps.setdefault(step, {})
        if len(self.steps) > KEPT:
            oldest = next((one for one in self.steps if one >= 0 and one != step), None)
            if oldest is not None:
                _add(self.steps.pop(oldest), self.earlier)

    @contextmanager
    def outside_of_steps(self) -> Iterator[None]:
        """Inside, traffic belongs to no step: it is counted under -1."""
        before = self.step
        self.begin(-1)
        try:
            yield
        finally:
            self.begin(before)

    def send(self, axis: str, kind: str, op: str, nbytes: int, calls: int = 1) -> None:
        """Count `nbytes` handed to the network (about half a microsecond; never a profiler range)."""
        key = Flow(axis, kind, op)
        traffic = self._flows.get(key)
        if traffic is None:
            traffic = self._flows[key] = Traffic()
        traffic.calls += calls
        traffic.bytes += nbytes

    def span(self, lane: str, name: str, start: int, end: int, **args: Any) -> None:
        """Keep a stretch of time, if recording."""
        if self.recording:
            self.spans.append(Span(lane, name, start, end, args))

    def peak(self, category: str, nbytes: int) -> None:
        """Raise the peak of a memory category to at least `nbytes`."""
        self.memory[category] = max(self.memory.get(category, 0), nbytes)

    def traffic(self, step: int | None = None) -> dict[Flow, Traffic]:
        """The bytes matrix of one step, or the sum over all steps."""
        if step is not None:
            return self.steps.get(step, {})
        total: dict[Flow, Traffic] = {}
        for flows in (self.earlier, *self.steps.values()):
            _add(flows, total)
        return total

    def sent(self, step: int | None = None, *, axis: str | None = None, kind: str | None = None) -> int:
        """Bytes sent, optionally of one axis or kind only."""
        return sum(
            one.bytes
            for key, one in self.traffic(step).items()
            if (axis is None or key.axis == axis) and (kind is None or key.kind == kind)
        )

    def to_dict(self) -> dict[str, Any]:
        """The plain mapping, ready for JSON, that `from_dict` reads back; a flow is written "axis/kind/op"."""
        return {
            "rank": self.rank,
            "step": self.step,
            "steps": {str(step): _plain(flows) for step, flows in self.steps.items()},
            "earlier": _plain(self.earlier),
            "spans": [list(span) for span in self.spans],
            "memory": dict(self.memory),
            "notes": dict(self.notes),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Ledger:
        """Read what `to_dict` wrote.

        Raises:
            ValueError: it is not a ledger; the message names the part that cannot be read.
        """
        try:
            return cls(
                rank=int(plain["rank"]),
                step=int(plain["step"]),
                steps={int(step): _flows(flows) for step, flows in plain["steps"].items()},
                spans=[Span(lane, name, int(start), int(end), args) for lane, name, start, end, args in plain["spans"]],
                memory={str(category): int(nbytes) for category, nbytes in plain["memory"].items()},
                notes={str(note): float(value) for note, value in plain["notes"].items()},
                earlier=_flows(plain.get("earlier", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"not a ledger: {type(error).__name__} {error}; expected what Ledger.to_dict wrote"
            ) from error

    def __sub__(self, measured: Ledger) -> list[Difference]:
        """Forecast minus measurement, row by row: bytes of one step, memory, notes."""
        return list(_rows(self, measured))


def _add(flows: Mapping[Flow, Traffic], total: dict[Flow, Traffic]) -> None:
    for key, one in flows.items():
        entry = total.setdefault(key, Traffic())
        entry.calls += one.calls
        entry.bytes += one.bytes


def _plain(flows: Mapping[Flow, Traffic]) -> dict[str, list[int]]:
    return {"/".join(flow): [traffic.calls, traffic.bytes] for flow, traffic in flows.items()}


def _flows(plain: Mapping[str, Any]) -> dict[Flow, Traffic]:
    flows = {}
    for key, (calls, nbytes) in plain.items():
        axis, kind, op = key.rsplit("/", 2)  # a part of an axis is called "y/4"
        flows[Flow(axis, kind, op)] = Traffic(int(calls), int(nbytes))
    return flows


def _rows(forecast: Ledger, measured: Ledger) -> Iterator[Difference]:
    mine, theirs = forecast.traffic(forecast.step), measured.traffic(measured.step)
    for key in sorted(mine.keys() | theirs.keys()):
        name = f"bytes {key.axis} {key.kind} {key.op}"
        yield _difference(name, mine.get(key, Traffic()).bytes, theirs.get(key, Traffic()).bytes)
    for category in sorted(forecast.memory.keys() | measured.memory.keys()):
        yield _difference(f"memory {category}", forecast.memory.get(category, 0), measured.memory.get(category, 0))
    for note in sorted(forecast.notes.keys() & measured.notes.keys()):
        yield _difference(note, forecast.notes[note], measured.notes[note])


def _difference(what: str, forecast: float, measured: float) -> Difference:
    return Difference(what, forecast, measured, (forecast - measured) / measured if measured else None)
