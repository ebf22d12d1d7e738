"""A timeline is what ran when, whether in virtual or in real time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from fourfold.ledger import Span
from fourfold.schedule.action import Action, Buffer
from fourfold.schedule.collector import resting
from fourfold.schedule.program import Lane, Life, Program


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

    def memory(self, size: Callable[[Buffer], int]) -> dict[int, list[tuple[float, int]]]:
        """Per worker, the moments at which it comes to hold more or less, and the bytes that it holds from then on.

        A buffer exists from the start of the action that writes it to the end of the last one that reads or frees it;
        one that nobody reads stays. At one moment, releases come before acquisitions. What is there from the start of
        the program does not count.
        """
        return {worker: list(steps) for worker, steps in enumerate(self._steps(size))}

    def peaks(self, size: Callable[[Buffer], int]) -> dict[int, int]:
        """The most bytes of buffers that each worker held at once, counted as in `memory`."""
        steps = enumerate(self._steps(size))
        return {worker: max((held for _, held in line), default=0) for worker, line in steps}

    @resting()
    def _steps(self, size: Callable[[Buffer], int]) -> list[Iterator[tuple[float, int]]]:
        """Per worker, what `memory` tells of it. An action writes on one worker and reads on one."""
        starts, ends, workers = self.starts, self.ends, range(self.program.workers)
        taken, given = [0] * len(starts), [0] * len(starts)
        begins: list[list[int]] = [[] for _ in workers]
        stops: list[list[int]] = [[] for _ in workers]
        for life in self.program.lives:
            writer = life.writer
            if writer is None or starts[writer] is None or not (held := size(life.buffer)):
                continue
            if not taken[writer]:
                begins[life.worker].append(writer)
            taken[writer] += held
            users = life.users
            last = users[0] if len(users) == 1 else self._last(life)
            if last is not None and ends[last] is not None:
                if not given[last]:
                    stops[life.worker].append(last)
                given[last] += held
        return [
            _levels(_changes(begins[worker], starts, taken), _changes(stops[worker], ends, given)) for worker in workers
        ]

    def _last(self, life: Life) -> int | None:
        """The user that is done last, of those that ran here."""
        if life.freer is not None:
            return life.freer  # an edge lets it begin after all others
        ran = [user for user in life.users if self.ends[user] is not None]
        return max(ran, key=lambda user: self.ends[user] or 0.0, default=None)

    def _length(self, number: int) -> float:
        start, end = self.starts[number], self.ends[number]
        return 0.0 if start is None or end is None else end - start


def _changes(numbers: list[int], moments: list[float | None], changes: list[int]) -> list[tuple[float, int]]:
    """When and by how much these actions change what is held, in the sequence of time."""
    return sorted([(moments[number] or 0.0, changes[number]) for number in numbers], key=itemgetter(0))


def _levels(taken: list[tuple[float, int]], given: list[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """What is held after each change, of acquisitions and releases that are each in the sequence of time."""
    held, place = 0, 0
    for moment, more in taken:
        while place < len(given) and given[place][0] <= moment:
            held -= given[place][1]
            yield given[place][0], held
            place += 1
        held += more
        yield moment, held
    for moment, less in given[place:]:
        held -= less
        yield moment, held
