"""Ranks as threads of this process: `launch` runs a body once a rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from fourfold.wire.backends.threads import Room, ThreadFabric
from fourfold.wire.errors import RankFailed, Stalled
from fourfold.wire.world import World

GRACE = 10.0
"""Seconds that the others have to notice that a rank has failed (less, where the time-out is shorter)."""
POLL = 0.25
"""Seconds between two looks of the launching thread."""


def launch(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    stopping: Callable[[], bool] = lambda: False,
    in_turn: bool = False,
) -> list[Any]:
    """Run `body(world, *args)` on `size` ranks, each a thread, and return the results in rank order.

    The launching thread never blocks for longer than `POLL`, so that it hears signals; the ranks are daemons, so that
    a rank which hangs does not keep the process alive.

    Args:
        timeout: how long one rank may keep the others waiting inside a collective (s).
        stopping: whether somebody wishes to stop. The bodies must heed the wish themselves; but once it is there, a
            collective that is stuck fails within seconds and not only after `timeout`.
        in_turn: one rank runs at a time, until it waits for others: for bodies that share Python state which a process
            would have to itself.

    Raises:
        RankFailed: a rank raised; it names the rank, and its `__cause__` is that rank's exception.
        Stalled: a rank neither returned nor entered a collective after another had failed.
    """
    turn = threading.Lock() if in_turn else None
    room = Room(size, timeout, turn)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        world = World(rank, size, "threads", torch.device("cpu"), fabric=ThreadFabric(room, rank))
        try:
            with turn or nullcontext():
                results[rank] = body(world, *args)
        except BaseException as error:  # whatever it is, the others must not wait for this rank
            room.fail(rank, error)
        finally:
            room.finish(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    try:
        _join(threads, room, stopping)
    except BaseException as error:
        room.fail(-1, error)
        raise
    if room.failure is not None:
        rank, error = room.failure
        raise RankFailed(rank, size, f"{type(error).__name__}: {error}") from error
    return results


def _join(threads: list[threading.Thread], room: Room, stopping: Callable[[], bool]) -> None:
    deadline = None
    while alive := [thread.name for thread in threads if thread.is_alive()]:
        with room.changed:
            if len(room.gone) < len(threads):
                room.changed.wait(POLL)
        if len(room.gone) == len(threads):
            for thread in threads:
                thread.join(POLL)
        if stopping():
            room.hurry()
        if room.failure is not None:
            deadline = deadline or time.monotonic() + min(room.timeout, GRACE)
            if time.monotonic() > deadline:
                rank, error = room.failure
                raise Stalled(f"rank {rank} failed ({error}), and {', '.join(alive)} did not stop") from error
