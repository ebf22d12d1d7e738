"""Bind an order to workers: choose a worker where the order left it open, insert transfers, draw the edges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from fourfold.schedule.action import ANY, MOVE, WEIGHT, Action, Buffer, ScheduleError
from fourfold.schedule.program import Copy, Lane, Program


def bind(actions: Iterable[Action], workers: int) -> Program:
    """Turn an order's actions into a program for `workers` workers.

    A buffer that is read on another worker than the one that wrote it is moved there once, before its first read. A
    link's moves run in the sequence in which their source produces, so that no link blocks by its order.

    Raises:
        ScheduleError: a worker that does not exist, a buffer that is written twice or never.
    """
    placed = _resolve(actions, workers)
    listed = _with_moves(placed, _homes(placed))
    producers = {(buffer, action.worker): number for number, action in enumerate(listed) for buffer in action.writes}
    lanes = _lanes(listed, producers)
    users = _users(listed)
    before = _edges(listed, producers, lanes, users)
    after: list[list[int]] = [[] for _ in listed]
    for number, others in enumerate(before):
        for other in others:
            after[other].append(number)
    lane_of: list[Lane] = [Lane(0, "")] * len(listed)
    for lane, numbers in lanes.items():
        for number in numbers:
            lane_of[number] = lane
    return Program(
        actions=tuple(listed),
        workers=workers,
        lanes={lane: tuple(numbers) for lane, numbers in lanes.items()},
        lane=tuple(lane_of),
        before=tuple(before),
        after=tuple(map(tuple, after)),
        lives={copy: (number, tuple(users.get(copy, ()))) for copy, number in producers.items()},
    )


def _resolve(actions: Iterable[Action], workers: int) -> list[Action]:
    """ANY becomes the next worker in turn, the same one for all micro-batches of a kind and stage."""
    slots: dict[tuple[str, int], int] = {}
    placed = []
    for action in actions:
        if action.worker == ANY:
            slot = slots.setdefault((action.kind, action.stage), len(slots) % workers)
            action = action._replace(worker=slot)
        elif not 0 <= action.worker < workers:
            raise ScheduleError(
                f"{action}: expected a worker from 0 to {workers - 1}; try more workers or another order"
            )
        placed.append(action)
    return placed


def _homes(placed: list[Action]) -> dict[Buffer, dict[int, None]]:
    """The workers on which each buffer is written: one, but for weights, which each worker with a copy updates."""
    homes: dict[Buffer, dict[int, None]] = {}
    for action in placed:
        for buffer in action.writes:
            there = homes.setdefault(buffer, {})
            if action.worker in there or (there and buffer.kind != WEIGHT):
                raise ScheduleError(
                    f"{action} writes the {buffer}, which another action has written; write a new version"
                )
            there[action.worker] = None
    return homes


def _with_moves(placed: list[Action], homes: dict[Buffer, dict[int, None]]) -> list[Action]:
    """The actions, each after the moves that bring what it reads: of several copies the first written is moved."""
    listed: list[Action] = []
    moved: set[Copy] = set()
    for action in placed:
        for buffer in action.reads:
            there = homes.get(buffer)
            if there is None:
                if buffer.kind != WEIGHT or buffer.version:
                    raise ScheduleError(f"{action} reads the {buffer}, which no action writes")
            elif action.worker not in there and (buffer, action.worker) not in moved:
                moved.add((buffer, action.worker))
                batches = range(buffer.microbatch, buffer.microbatch + 1)
                home = next(iter(there))
                listed.append(
                    Action(MOVE, buffer.stage, batches, action.worker, "link", (buffer,), (buffer,), (), home)
                )
        listed.append(action)
    return listed


def _lanes(listed: list[Action], producers: dict[Copy, int]) -> dict[Lane, list[int]]:
    lanes: defaultdict[Lane, list[int]] = defaultdict(list)
    for number, action in enumerate(listed):
        name = action.lane if action.source is None else f"{action.lane} {action.worker}"
        lanes[Lane(action.where, name)].append(number)
    for numbers in lanes.values():
        if listed[numbers[0]].source is not None:
            numbers.sort(key=lambda number: producers[listed[number].reads[0], listed[number].where])
    return dict(lanes)


def _users(listed: list[Action]) -> dict[Copy, list[int]]:
    """Who reads or frees each copy."""
    users: defaultdict[Copy, list[int]] = defaultdict(list)
    for number, action in enumerate(listed):
        for buffer in {*action.reads, *action.frees}:
            users[buffer, action.where].append(number)
    return users


def _edges(
    listed: list[Action], producers: dict[Copy, int], lanes: dict[Lane, list[int]], users: dict[Copy, list[int]]
) -> list[tuple[int, ...]]:
    """Per action: who wrote what it reads, who still reads what it frees, and its lane's predecessor."""
    previous = {follower: number for numbers in lanes.values() for number, follower in pairwise(numbers)}
    edges = []
    for number, action in enumerate(listed):
        touched = ((buffer, action.where) for buffer in (*action.reads, *action.frees))
        found = {producers[copy]: None for copy in touched if copy in producers}
        for buffer in action.frees:
            found.update((user, None) for user in users[buffer, action.worker] if user != number)
        if number in previous:
            found[previous[number]] = None
        edges.append(tuple(found))
    return edges
