"""Ready mode: the order's list is only a ranking, and an idle worker runs the best of what is ready.

A worker that waits for one action in particular passes every delay of its neighbours on. Here a lane keeps the edges of
the data and drops those of the list (RRFP, "A readiness-driven runtime for pipeline-parallel training under runtime
variability", 2026). Links carry what is ready as well. The arithmetic is the same: gradients have names, and an update
sums them in the sequence of their micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal, NamedTuple

from fourfold.schedule.action import ScheduleError
from fourfold.schedule.bind import data_edges
from fourfold.schedule.budget import Budget, Holding
from fourfold.schedule.machine import Alert
from fourfold.schedule.program import Lane, Program
from fourfold.schedule.timeline import Timeline

Agree = Callable[[int], int]
"""Ranks that run one program in lockstep (a tensor group) each give the number of the action that they would run, and
all get the same one of these back: say, the lowest. The next call comes when that action has run. It may wait for the
others: what is ready on one of them will be on all, since the ranks that they are sent it from agree as well."""


class Mode(NamedTuple):
    """How a worker chooses.

    Attributes:
        budget: what the workers may hold.
        first: of what is ready, the first in the order's list runs, or what has been ready for longest.
    """

    budget: Budget
    first: Literal["ranked", "arrived"] = "ranked"


def drive_ready(program: Program, machine: Alert, mode: Mode, agree: Agree | None = None) -> Timeline:
    """Run the share of a program that the machine owns, each compute lane in whatever sequence its data comes.

    Args:
        program: what `bind` returned.
        machine: what runs it.
        mode: how a worker chooses.
        agree: of a machine that owns one worker, what makes its group agree on the next action.

    Raises:
        ScheduleError: the order's own sequence holds more than the budget, so that there is no way that surely ends; or
            a group is to agree on the actions of several workers at once.
    """
    if agree is not None and len(machine.owns) != 1:
        raise ScheduleError(
            f"agreement on the next action: expected a machine of one worker, found {len(machine.owns)}; try `Ranks`"
        )
    queues = Queues(program, machine.owns, mode, agree)
    actions, lane = program.actions, program.lane
    starts: list[float | None] = [None] * len(actions)
    ends: list[float | None] = [None] * len(actions)
    running: dict[int, int] = {}

    def issue(numbers: Iterator[int]) -> None:
        for number in numbers:
            running[id(actions[number])] = number
            machine.issue(actions[number], lane[number])

    while queues.left:
        issue(queues.others())
        if not machine.due():  # all that is done by now is known
            issue(queues.computes())
        if not running:
            done = [number for number, end in enumerate(ends) if end is not None]
            raise program.stuck(done, machine.owns)
        action, start, end = machine.next()
        number = running.pop(id(action))
        starts[number], ends[number] = start, end
        queues.done(number)
    return Timeline(program, starts, ends)


class Queues:
    """What is ready and waits for its lane, in one process's share of a program.

    Attributes:
        left: how many actions are not done.
    """

    def __init__(self, program: Program, owns: Collection[int], mode: Mode, agree: Agree | None) -> None:
        self._program, self._first, self._agree = program, mode.first, agree
        mine = [action.worker in owns or action.source in owns for action in program.actions]
        self.left = sum(mine)
        weights, limits = mode.budget.weigh(program), mode.budget.limits
        self._holdings = {
            name: Holding(name.worker, numbers, weights, limits[name.worker])
            for name, numbers in program.lanes.items()
            if name.name == "compute"
        }
        self._followers: list[list[int]] = [[] for _ in mine]
        self._needs = [0] * len(mine)
        self._ready: dict[Lane, list[int]] = {name: [] for name in program.lanes if name.worker in owns}
        self._busy: set[Lane] = set()
        self._agreed: dict[Lane, int] = {}
        self._free: list[int] = []
        for number, before in enumerate(data_edges(len(mine), program.lives)):
            for other in dict.fromkeys(before):
                if mine[number] and mine[other]:
                    self._followers[other].append(number)
                    self._needs[number] += 1
            if mine[number] and not self._needs[number]:
                self._add(number)

    def others(self) -> Iterator[int]:
        """What starts now beside computation: moves on idle links, and every move from a worker of another process."""
        yield from self._free
        self._free = []
        for lane, ready in self._ready.items():
            if ready and lane not in self._busy and lane not in self._holdings:
                yield self._take(lane, min(ready))

    def computes(self) -> Iterator[int]:
        """What starts now on idle compute lanes."""
        for lane, holding in self._holdings.items():
            if lane in self._busy or not (ready := self._ready.get(lane)):
                continue
            number = self._choose(lane, ready, holding)
            if number in ready:
                holding.begin(number)
                yield self._take(lane, number)

    def done(self, number: int) -> None:
        """Its lane is idle again, and what has waited for it alone is ready."""
        self.left -= 1
        self._busy.discard(self._program.lane[number])
        for follower in self._followers[number]:
            self._needs[follower] -= 1
            if not self._needs[follower]:
                self._add(follower)

    def _choose(self, lane: Lane, ready: list[int], holding: Holding) -> int | None:
        """The best that fits the budget or, of a group, what it has agreed on, which may not have come yet."""
        if lane in self._agreed:
            return self._agreed[lane]
        line = sorted(ready) if self._first == "ranked" else ready
        number = next((one for one in line if holding.allows(one)), None)
        if number is not None and self._agree is not None:
            number = self._agreed[lane] = self._agree(number)
        return number

    def _take(self, lane: Lane, number: int) -> int:
        self._ready[lane].remove(number)
        self._agreed.pop(lane, None)
        self._busy.add(lane)
        return number

    def _add(self, number: int) -> None:
        """The source's process alone says what a link carries next; others take what comes."""
        self._ready.get(self._program.lane[number], self._free).append(number)
