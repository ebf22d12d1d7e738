"""A program is a bound order: every action on a worker, dependencies as integer ids, one list a lane."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from fourfold.schedule.action import Action, Buffer, ScheduleError


class Lane(NamedTuple):
    """Where actions run one after the other: "compute" of a worker, "link 3" from it to worker 3, ..."""

    worker: int
    name: str


@dataclass(slots=True, eq=False)
class Life:
    """A copy of a buffer, as it lies on one worker.

    It exists from the start of the action that writes it to the end of the last that uses it; if there is none, to the
    program's end.

    Attributes:
        buffer: what lies there.
        worker: where.
        writer: the number of the action that writes it; None: it is there from the start.
        users: the numbers of all actions that read or free it.
        freer: the number of the one that frees it, if one does.
    """

    buffer: Buffer
    worker: int
    writer: int | None = None
    users: list[int] = field(default_factory=list)
    freer: int | None = None


class Part(NamedTuple):
    """What one process drives: its share of a program.

    Attributes:
        needs: per action, how many owned actions must finish before it may start.
        first: the owned actions that need none.
        size: how many actions are owned.
    """

    needs: list[int]
    first: list[int]
    size: int


@dataclass(frozen=True, eq=False)
class Program:
    """Actions are numbered by their position; an edge a → b means that b starts after a is done.

    Attributes:
        actions: every action, moves included.
        workers: how many workers there are.
        lanes: the numbers of each lane's actions, in running order.
        lane: each action's lane.
        before: numbers of the actions that must be done before: data edges first, then the lane's predecessor.
        after: the same edges, forwards.
        lives: of every copy that an action writes, reads or frees.
    """

    actions: tuple[Action, ...]
    workers: int
    lanes: dict[Lane, tuple[int, ...]]
    lane: tuple[Lane, ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    lives: tuple[Life, ...]

    def part(self, owns: Collection[int]) -> Part:
        """The share of a process that owns these workers: actions with an end there, edges between such actions."""
        owned = [action.worker in owns or action.source in owns for action in self.actions]
        needs = [sum(owned[other] for other in before) for before in self.before]
        return Part(needs, [number for number, need in enumerate(needs) if owned[number] and not need], sum(owned))

    def stuck(self, done: Collection[int], owns: Collection[int]) -> ScheduleError:
        """The error that names what the head of each lane waits for, given what is done."""
        done = set(done)
        lines = []
        for lane, numbers in self.lanes.items():
            head = next((number for number in numbers if number not in done), None)
            if head is None or (lane.worker not in owns and self.actions[head].worker not in owns):
                continue
            missing = [str(self.actions[other]) for other in self.before[head] if other not in done]
            lines.append(f"{self.actions[head]} waits for {', and for '.join(missing)}")
        return ScheduleError(f"the schedule deadlocks after {len(done)} actions:\n  " + "\n  ".join(lines))
