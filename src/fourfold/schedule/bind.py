"""Bind an order to workers: choose a worker where the order left it open, insert transfers, draw the edges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise

from fourfold.schedule.action import ANY, MOVE, WEIGHT, Action, Buffer, ScheduleError
from fourfold.schedule.collector import resting
from fourfold.schedule.program import Lane, Life, Program

Lives = list[dict[Buffer, Life]]
"""Per worker, the copies of buffers that lie there at some time."""


@resting()
def bind(actions: Iterable[Action], workers: int, given: Mapping[Buffer, int] | None = None) -> Program:
    """Turn an order's actions into a program for `workers` workers.

    A buffer that is read on another worker than the one that wrote it is moved there once, before its first read. A
    link's moves run in the sequence in which their source produces, so that no link blocks by its order.

    Args:
        actions: each worker's in running order.
        workers: how many there are.
        given: of what lies there from the start, beside the weights of version 0, on which worker.

    Raises:
        ScheduleError: a worker that does not exist, a buffer that is written twice or never, or freed twice.
    """
    placed = list(_resolve(actions, workers))
    lives: Lives = [{} for _ in range(workers)]
    given = given or {}
    for buffer, worker in given.items():
        lives[worker][buffer] = Life(buffer, worker)
    listed = _with_moves(placed, {**given, **_homes(placed, lives)}, lives)
    copies = tuple(chain.from_iterable(there.values() for there in lives))
    before = data_edges(len(listed), copies)
    lane, lanes = _lanes(listed)
    for numbers in lanes.values():
        if listed[numbers[0]].source is not None:
            numbers.sort(key=lambda number: before[number][:1])
        for number, follower in pairwise(numbers):
            before[follower].append(number)
    edges = tuple(tuple(dict.fromkeys(others)) for others in before)
    after: list[list[int]] = [[] for _ in listed]
    for number, others in enumerate(edges):
        for other in others:
            after[other].append(number)
    return Program(
        actions=tuple(listed),
        workers=workers,
        lanes={name: tuple(numbers) for name, numbers in lanes.items()},
        lane=tuple(lane),
        before=edges,
        after=tuple(map(tuple, after)),
        lives=copies,
    )


def _resolve(actions: Iterable[Action], workers: int) -> Iterator[Action]:
    """ANY becomes the next worker in turn, the same one for all micro-batches of a kind and stage."""
    slots: dict[tuple[str, int], int] = {}
    for action in actions:
        if 0 <= action.worker < workers:
            yield action
        elif action.worker == ANY:
            yield action._replace(worker=slots.setdefault((action.kind, action.stage), len(slots) % workers))
        else:
            raise ScheduleError(
                f"{action}: expected a worker from 0 to {workers - 1}; try more workers or another order"
            )


def _homes(placed: list[Action], lives: Lives) -> dict[Buffer, int]:
    """The worker that writes each buffer, the first of several copies; begins the life of each copy.

    Only weights have several: each worker with a copy of a stage updates its own.
    """
    homes: dict[Buffer, int] = {}
    for action in placed:
        worker = action.worker
        there = lives[worker]
        for buffer in action.writes:
            if buffer in there or (buffer in homes and buffer.kind != WEIGHT):
                raise ScheduleError(
                    f"{action} writes the {buffer}, which another action has written; write a new version"
                )
            homes.setdefault(buffer, worker)
            there[buffer] = Life(buffer, worker)
    return homes


def _with_moves(placed: list[Action], homes: dict[Buffer, int], lives: Lives) -> list[Action]:
    """The actions, each after the moves that bring what it reads; notes in `lives` who writes, uses and frees."""
    listed: list[Action] = []
    for action in placed:
        here = lives[action.where]
        found = [here.get(buffer) or _bring(buffer, action, homes, lives, listed) for buffer in action.reads]
        number = len(listed)
        for life in found:
            life.users.append(number)
        for buffer in action.frees:
            life = here.get(buffer) or here.setdefault(buffer, Life(buffer, action.where))
            if life.freer is not None:
                raise ScheduleError(f"{action} frees the {buffer}, which {listed[life.freer]} has freed")
            life.freer = number
            if not life.users or life.users[-1] != number:
                life.users.append(number)
        there = lives[action.worker]
        for buffer in action.writes:
            there[buffer].writer = number
        listed.append(action)
    return listed


def _bring(buffer: Buffer, reader: Action, homes: dict[Buffer, int], lives: Lives, listed: list[Action]) -> Life:
    """The life of a copy that no action writes where it is read: a move begins it or, of a weight, the step."""
    life = lives[reader.where][buffer] = Life(buffer, reader.where)
    if buffer in homes:
        home, batches = homes[buffer], range(buffer.microbatch, buffer.microbatch + 1)
        life.writer = len(listed)
        lives[home][buffer].users.append(life.writer)
        listed.append(Action(MOVE, buffer.stage, batches, reader.where, "link", (buffer,), (buffer,), (), home))
    elif buffer.kind != WEIGHT or buffer.version:
        raise ScheduleError(f"{reader} reads the {buffer}, which no action writes")
    return life


def data_edges(count: int, copies: Iterable[Life]) -> list[list[int]]:
    """Per action: who wrote what it reads or frees, then who still reads what it frees."""
    before: list[list[int]] = [[] for _ in range(count)]
    freed = []
    for life in copies:
        if life.writer is not None:
            for user in life.users:
                before[user].append(life.writer)
        if life.freer is not None and len(life.users) > 1:
            freed.append(life)
    for life in freed:
        before[life.freer] += [user for user in life.users if user != life.freer]
    return before


def _lanes(listed: list[Action]) -> tuple[list[Lane], dict[Lane, list[int]]]:
    """Each action's lane, one that a worker names or, of moves, one for each link; and each lane's actions."""
    lanes: dict[Lane, list[int]] = {}
    known: dict[tuple[int, str, int | None], tuple[Lane, list[int]]] = {}
    lane = []
    for number, action in enumerate(listed):
        key = (action.worker, action.lane, action.source)
        if key not in known:
            name = Lane(action.where, action.lane if action.source is None else f"{action.lane} {action.worker}")
            known[key] = name, lanes.setdefault(name, [])
        name, numbers = known[key]
        lane.append(name)
        numbers.append(number)
    return lane, lanes
