"""Message-driven nodes: instances of any size pass through the nodes of a static graph, each in its own way.

AMPNet (Gaunt et al. 2017, section 3). A node is a part of the model with weights of its own, and lives on one worker.
An instance (a sequence, a tree) says which nodes it visits and what each visit takes from earlier ones, so that
instances of different sizes need no batch. A visit runs forward when all that it takes has come, and backward when the
gradient of what it made has; a worker runs backwards before forwards, and else what came first. A node updates its
weights as soon as enough instances have left their gradients, whatever other instances are on their way: these go
backward with newer weights than they went forward with.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from fourfold.schedule.action import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    BACKWARD,
    FORWARD,
    GRADIENT,
    MOVE,
    STASH,
    UPDATE,
    WEIGHT,
    Action,
    Buffer,
    ScheduleError,
)
from fourfold.schedule.machine import Completion, Machine
from fourfold.schedule.program import Lane

RANK = {UPDATE: 0, MOVE: 0, BACKWARD: 1, FORWARD: 2}
"""Of what waits for one lane, the lowest goes first."""


class Visit(NamedTuple):
    """One stop of an instance.

    Attributes:
        node: where.
        takes: the earlier visits of the instance whose values it is given, by their places in the path.
    """

    node: int
    takes: tuple[int, ...] = ()


Path = Sequence[Visit]
"""An instance's visits, each after those that it takes from. The value of every visit is taken once, but for the last
one's, which is the loss. (What several need passes through a node that copies it.)"""


class Task(NamedTuple):
    """What waits for a lane, in the sequence in which it shall run."""

    rank: int
    came: int
    kind: str
    node: int
    instance: int = -1
    visit: int = -1
    buffer: Buffer | None = None
    source: int | None = None


class Nodes:
    """One epoch: what may run next, and what follows from what is done.

    A value's buffer is named by the node, the instance and, as its version, the visit that made it; a gradient on its
    way by those of the visit that it is for.

    Attributes:
        versions: of each node, how many updates it has made.
        staleness: of each node, the most updates between a forward and its backward.
        flying: instances in flight.
        most: the most that were.
    """

    def __init__(self, homes: Sequence[int], paths: Iterable[Path], active: int, frequency: int = 1) -> None:
        """
        Args:
            homes: the worker of each node.
            paths: of the epoch's instances.
            active: AMPNet's max_active_keys: instance k comes in when all up to k - active are all the way back. So at
                most so many are in flight, and none meets more than 2 (active - 1) others on its way.
            frequency: AMPNet's min_update_frequency: of how many instances a node takes all gradients at a time. What
                is left at the end is fewer.

        Raises:
            ScheduleError: nobody may come in, or an update without gradients.
        """
        for name, value in (("active", active), ("frequency", frequency)):
            if value < 1:
                raise ScheduleError(f"nodes: expected {name} of at least 1, found {value}; try 1")
        self._homes, self._paths = homes, iter(paths)
        self._active, self._frequency = active, frequency
        self.versions, self.staleness = [0] * len(homes), [0] * len(homes)
        self.flying = self.most = 0
        self._came = self._admitted = self._oldest = 0
        self._queues: dict[Lane, list[Task]] = {}
        self._busy: set[Lane] = set()
        self._running: dict[int, tuple[Task, Lane]] = {}
        self._path: dict[int, Path] = {}
        self._taker: dict[int, list[int]] = {}
        self._missing: dict[int, list[int]] = {}
        self._to_come_back: dict[int, Counter[int]] = {}
        self._seen: dict[tuple[int, int], int] = {}
        self._ripe: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._ripe_instances: Counter[int] = Counter()
        self._admit()

    def starts(self) -> Iterator[tuple[Action, Lane]]:
        """What starts now, on lanes that are idle."""
        for lane in list(self._queues):
            if lane not in self._busy and self._queues[lane]:
                task = heappop(self._queues[lane])
                action = self._action(task)
                self._busy.add(lane)
                self._running[id(action)] = task, lane
                yield action, lane

    def done(self, action: Action) -> None:
        """Note it, and what is ready by it."""
        task, lane = self._running.pop(id(action))
        self._busy.discard(lane)
        if task.kind == MOVE:
            self._arrive(action.writes[0], task.instance, task.visit)
        elif task.kind == FORWARD:
            self._forward_done(task, action)
        elif task.kind == BACKWARD:
            self._backward_done(task, action)
        else:
            self.versions[task.node] += 1

    # ---- instances

    def _admit(self) -> None:
        while self._admitted < self._oldest + self._active and (path := next(self._paths, None)) is not None:
            instance = self._admitted
            self._taker[instance] = _takers(path, len(self._homes))
            self._path[instance] = path
            self._missing[instance] = [len(visit.takes) for visit in path]
            self._to_come_back[instance] = Counter(visit.node for visit in path)
            self._admitted += 1
            self.flying += 1
            self.most = max(self.most, self.flying)
            for place, visit in enumerate(path):
                if not visit.takes:
                    self._queue(FORWARD, visit.node, instance, place)
        if not self.flying:
            for node, left in self._ripe_instances.items():
                if left:
                    self._update(node)

    def _leave(self, instance: int) -> None:
        del self._path[instance], self._taker[instance], self._missing[instance], self._to_come_back[instance]
        self.flying -= 1
        while self._oldest < self._admitted and self._oldest not in self._path:
            self._oldest += 1
        self._admit()

    # ---- messages

    def _forward_done(self, task: Task, action: Action) -> None:
        self._seen[task.instance, task.visit] = action.reads[0].version
        taker = self._taker[task.instance][task.visit]
        if taker == task.visit:  # the loss: back it goes
            self._queue(BACKWARD, task.node, task.instance, task.visit)
        else:
            self._send(action.writes[1], task, taker)

    def _backward_done(self, task: Task, action: Action) -> None:
        instance, node = task.instance, task.node
        late = action.reads[0].version - self._seen.pop((instance, task.visit))
        self.staleness[node] = max(self.staleness[node], late)
        for gradient, giver in zip(action.writes[1:], self._path[instance][task.visit].takes, strict=True):
            self._send(gradient, task, giver)
        self._ripe[node].append(action.writes[0])
        left = self._to_come_back[instance]
        left[node] -= 1
        if not left[node]:
            self._ripe_instances[node] += 1
            del left[node]
            if self._ripe_instances[node] == self._frequency:
                self._update(node)
        if not left:
            self._leave(instance)

    def _update(self, node: int) -> None:
        """Of the instances that have left all their gradients here; others' go into a later one."""
        self._ripe_instances[node] = 0
        self._queue(UPDATE, node)

    def _send(self, buffer: Buffer, task: Task, visit: int) -> None:
        """To a visit of the same instance, by a link if it is on another worker."""
        node = self._path[task.instance][visit].node
        if self._homes[node] == self._homes[task.node]:
            self._arrive(buffer, task.instance, visit)
        else:
            self._queue(MOVE, node, task.instance, visit, buffer, self._homes[task.node])

    def _arrive(self, buffer: Buffer, instance: int, visit: int) -> None:
        node = self._path[instance][visit].node
        if buffer.kind == ACTIVATION_GRADIENT:
            self._queue(BACKWARD, node, instance, visit)
            return
        self._missing[instance][visit] -= 1
        if not self._missing[instance][visit]:
            self._queue(FORWARD, node, instance, visit)

    # ---- actions

    def _queue(
        self,
        kind: str,
        node: int,
        instance: int = -1,
        visit: int = -1,
        buffer: Buffer | None = None,
        source: int | None = None,
    ) -> None:
        self._came += 1
        home = self._homes[node]
        lane = Lane(home, "compute") if source is None else Lane(source, f"link {home}")
        task = Task(RANK[kind], self._came, kind, node, instance, visit, buffer, source)
        heappush(self._queues.setdefault(lane, []), task)

    def _action(self, task: Task) -> Action:
        """What a task is now, with the weight as it is now."""
        node, instance, visit, home = task.node, task.instance, task.visit, self._homes[task.node]
        weight = Buffer(WEIGHT, node, -1, self.versions[node])
        batches = range(instance, instance + 1)
        if task.kind == UPDATE:
            return self._updating(node, weight)
        if task.kind == MOVE:
            assert task.buffer is not None
            moved = (task.buffer,)
            return Action(MOVE, node, batches, home, "link", moved, moved, (), task.source)
        path = self._path[instance]
        places = [(path[place].node, instance, place) for place in path[visit].takes]
        stash, is_loss = Buffer(STASH, node, instance, visit), self._taker[instance][visit] == visit
        if task.kind == FORWARD:
            taken = tuple(Buffer(ACTIVATION, *place) for place in places)
            made = (stash,) if is_loss else (stash, Buffer(ACTIVATION, node, instance, visit))
            return Action(FORWARD, node, batches, home, "compute", (weight, *taken), made, taken)
        used = (stash,) if is_loss else (stash, Buffer(ACTIVATION_GRADIENT, node, instance, visit))
        made = Buffer(GRADIENT, node, instance, visit), *(Buffer(ACTIVATION_GRADIENT, *place) for place in places)
        return Action(BACKWARD, node, batches, home, "compute", (weight, *used), made, used)

    def _updating(self, node: int, weight: Buffer) -> Action:
        """An update takes the gradients of those instances that have left all of theirs."""
        every = self._ripe.pop(node)
        whole = [one for one in every if node not in self._to_come_back.get(one.microbatch, ())]
        self._ripe[node] = [one for one in every if one not in whole]
        whole.sort()
        batches = range(whole[0].microbatch, whole[-1].microbatch + 1)
        used, new = (weight, *whole), weight._replace(version=weight.version + 1)
        return Action(UPDATE, node, batches, self._homes[node], "compute", used, (new,), used)


def drive_nodes(nodes: Nodes, machine: Machine) -> list[Completion]:
    """Run an epoch on a machine that owns all workers; what ran when."""
    ran: list[Completion] = []
    running = 0
    while True:
        for action, lane in nodes.starts():
            machine.issue(action, lane)
            running += 1
        if not running:
            return ran
        ran.append(machine.next())
        running -= 1
        nodes.done(ran[-1].action)


def _takers(path: Path, nodes: int) -> list[int]:
    """Which visit takes each one's value; the last takes its own.

    Raises:
        ScheduleError: a visit of no node, one that takes what is not made yet, or a value that is not taken once.
    """
    takers = [-1] * (len(path) - 1) + [len(path) - 1]
    for place, visit in enumerate(path):
        if not 0 <= visit.node < nodes:
            raise ScheduleError(
                f"visit {place}: expected a node from 0 to {nodes - 1}, found {visit.node}; try another"
            )
        for giver in visit.takes:
            if not 0 <= giver < place or takers[giver] != -1:
                raise ScheduleError(
                    f"visit {place} takes from visit {giver}: expected an earlier one that no other takes from; "
                    "try a node that copies"
                )
            takers[giver] = place
    if -1 in takers:
        raise ScheduleError(
            f"visit {takers.index(-1)}: expected a later one that takes its value, found none; try a path without it"
        )
    return takers
