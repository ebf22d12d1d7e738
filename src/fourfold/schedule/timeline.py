"""A timeline is what ran when, whether in virtual or in real time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fourfold.ledger import Span
from fourfold.schedule.action import Action, Buffer
from fourfold.schedule.program import Lane, Program


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every action of a program, in seconds; None for what another process ran.

    Attributes:
        program: what was run.
        starts, ends: by the actions' numbers.
    """

    program: Program
    starts: list[float | None]
    ends: list[float | None]

    def __iter__(self) -> Iterator[tuple[Action, float, float]]:
        """Actions with start and end, by number."""
        for action, start, end in zip(self.program.actions, self.starts, self.ends, strict=True):
            if start is not None and end is not None:
                yield action, start, end

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        ran = list(self)
        return max(end for _, _, end in ran) - min(start for _, start, _ in ran) if ran else 0.0

    def busy(self, worker: int, lane: str = "compute") -> float:
        """Seconds in which a worker's lane ran something."""
        return sum(self._length(number) for number in self.program.lanes.get(Lane(worker, lane), ()))

    def spans(self) -> list[Span]:
        """The timeline in the ledger's form, nanoseconds of the machine's clock."""
        found = []
        for number, lane in enumerate(self.program.lane):
            start, end = self.starts[number], self.ends[number]
            if start is not None and end is not None:
                action = self.program.actions[number]
                args = {"stage": action.stage, "worker": action.worker, "microbatch": action.microbatches.start}
                found.append(Span(lane.name, action.kind, round(start * 1e9), round(end * 1e9), args))
        return found

    def peaks(self, size: Callable[[Buffer], int]) -> dict[int, int]:
        """The most bytes of buffers that each worker held at once.

        A buffer exists from the start of the action that writes it to the end of the last one that reads or frees it;
        one that nobody reads stays. At one moment, releases count before acquisitions.
        """
        changes: list[tuple[float, int, int]] = []
        for (buffer, worker), (writer, users) in self.program.lives.items():
            start = self.starts[writer]
            if start is None:
                continue
            changes.append((start, size(buffer), worker))
            ends = [end for user in users if (end := self.ends[user]) is not None]
            if ends:
                changes.append((max(ends), -size(buffer), worker))
        held = dict.fromkeys(range(self.program.workers), 0)
        peaks = dict(held)
        for _, change, worker in sorted(changes, key=lambda entry: entry[:2]):
            held[worker] += change
            peaks[worker] = max(peaks[worker], held[worker])
        return peaks

    def _length(self, number: int) -> float:
        start, end = self.starts[number], self.ends[number]
        return 0.0 if start is None or end is None else end - start
