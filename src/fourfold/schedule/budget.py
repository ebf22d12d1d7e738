"""What a worker may hold, and whether it may run an action before its turn.

The order's own list is the way out: whatever ran before its turn, the rest of every worker's list can be run one after
the other, since nothing in it has more to wait for than before. A worker therefore runs something early only if the
rest of its list still fits the budget afterwards, and no choice can lead to a deadlock, whatever the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fourfold.schedule.action import Buffer, ScheduleError
from fourfold.schedule.figures import STEPS
from fourfold.schedule.program import Program


@dataclass(frozen=True)
class Budget:
    """The most that each worker may hold of what its own actions have begun.

    Attributes:
        limits: one a worker: passes of one stage and micro-batch in flight, or units of `size`.
        size: of a buffer. What one action of a worker writes only for others of the same lane (stashes, gradients)
            counts; what comes from or goes to other workers does not, since theirs is the choice, and their budget.
            None: a pass counts one from its forward to the end of its backward.

    What is there from the start counts for nothing; what no action frees, until its last reader in the list.
    """

    limits: Sequence[int]
    size: Callable[[Buffer], int] | None = None

    def weigh(self, program: Program) -> tuple[list[int], list[int]]:
        """Per action, what it takes when it begins, and what it gives back when it is done.

        Raises:
            ScheduleError: not one limit a worker.
        """
        if len(self.limits) != program.workers:
            raise ScheduleError(
                f"budget: expected a limit for each of {program.workers} workers, found {len(self.limits)}; "
                f"try {program.workers} limits"
            )
        takes, gives = [0] * len(program.actions), [0] * len(program.actions)
        if self.size is None:
            steps = [STEPS.get(action.kind, 0) for action in program.actions]
            return [max(step, 0) for step in steps], [max(-step, 0) for step in steps]
        for life in program.lives:
            if life.writer is None or any(program.lane[user] != program.lane[life.writer] for user in life.users):
                continue
            held = self.size(life.buffer)
            takes[life.writer] += held
            if life.users:
                gives[life.users[-1] if life.freer is None else life.freer] += held
        return takes, gives


class Holding:
    """What one worker holds while it runs its list, not always in sequence."""

    def __init__(self, worker: int, numbers: Iterable[int], weights: tuple[list[int], list[int]], limit: int) -> None:
        """
        Raises:
            ScheduleError: the list, run in its own sequence, holds more than the limit.
        """
        self._takes, self._gives = weights
        self._left = dict.fromkeys(numbers)
        self._limit, self._held = limit, 0
        peak = self._peak(self._left, 0)
        if peak > limit:
            raise ScheduleError(
                f"worker {worker}: the order's own sequence holds {peak} at once, the budget is {limit}; "
                f"try a budget of {peak}, or an order with fewer micro-batches in flight"
            )

    def allows(self, number: int) -> bool:
        """Whether the action fits now, and all that it overtakes still fits after it."""
        takes, gives = self._takes[number], self._gives[number]
        if self._held + takes > self._limit:
            return False
        return takes <= gives or self._peak(self._overtaken(number), self._held + takes - gives) <= self._limit

    def begin(self, number: int) -> None:
        """The action runs: it counts as done, since a lane runs nothing beside it."""
        del self._left[number]
        self._held += self._takes[number] - self._gives[number]

    def _overtaken(self, number: int) -> Iterable[int]:
        for other in self._left:
            if other == number:
                return
            yield other

    def _peak(self, numbers: Iterable[int], held: int) -> int:
        """The most that is held while these run one after the other."""
        peak = held
        for number in numbers:
            peak = max(peak, held + self._takes[number])
            held += self._takes[number] - self._gives[number]
        return peak
