"""Where what a forward keeps lies until its backward: on its worker, on that worker's host, or on another worker.

A stash that was away comes back as a later version of itself, so that a buffer is still written once: of one that was
on the host, the copy that comes back is version 1; of one that was on another worker, the copy there is version 1 and
the one that comes back version 2. A worker holds the bytes until the end of the move away and again from the start of
the move back; what starts the move back is a token, written by the piece of work after which there is room.
"""

from __future__ import annotations

from fourfold.schedule.action import EVICT, HOST, LOAD, OFFLOAD, RELOAD, ROOM, STASH, Action, Buffer

TO_HOST, FROM_HOST = "d2h", "h2d"
"""Lanes of a worker; both directions may be in use at once."""


def offload(stage: int, microbatch: int, worker: int) -> Action:
    """A stash goes to its worker's host."""
    stash, host = Buffer(STASH, stage, microbatch), Buffer(HOST, stage, microbatch)
    return Action(OFFLOAD, stage, _one(microbatch), worker, TO_HOST, (stash,), (host,), (stash,))


def reload(stage: int, microbatch: int, worker: int) -> Action:
    """It comes back, once there is room."""
    given = (Buffer(HOST, stage, microbatch), Buffer(ROOM, stage, microbatch))
    back = Buffer(STASH, stage, microbatch, 1)
    return Action(RELOAD, stage, _one(microbatch), worker, FROM_HOST, given, (back,), given)


def evict(stage: int, microbatch: int, worker: int, holder: int) -> Action:
    """A stash goes to another worker, which holds it."""
    stash, there = Buffer(STASH, stage, microbatch), Buffer(STASH, stage, microbatch, 1)
    return Action(EVICT, stage, _one(microbatch), holder, "evict", (stash,), (there,), (stash,), worker)


def load(stage: int, microbatch: int, worker: int, holder: int) -> Action:
    """It comes back, once the holder has heard that there is room: `bind` sends it the token."""
    given = (Buffer(STASH, stage, microbatch, 1), Buffer(ROOM, stage, microbatch))
    back = Buffer(STASH, stage, microbatch, 2)
    return Action(LOAD, stage, _one(microbatch), worker, "load", given, (back,), given, holder)


def with_room(action: Action, *passes: tuple[int, int]) -> Action:
    """The action, after which there is room for the stashes of these (stage, micro-batch)."""
    return action._replace(writes=(*action.writes, *(Buffer(ROOM, *one) for one in passes)))


def returned(backward: Action, version: int) -> Action:
    """The backward, of a stash that came back as this version."""

    def renewed(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        return tuple(one._replace(version=version) if one.kind == STASH else one for one in buffers)

    return backward._replace(reads=renewed(backward.reads), frees=renewed(backward.frees))


def _one(microbatch: int) -> range:
    return range(microbatch, microbatch + 1)
