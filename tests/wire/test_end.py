"""At the end of a process the backend's threads end: one that outlives Python takes the process down."""

from __future__ import annotations

import psutil
import torch

from fourfold import wire
from fourfold.ledger import Ledger
from fourfold.wire.backends.process_group import GroupFabric
from ranks import Processes


def threads() -> int:
    return psutil.Process().num_threads()


def end_of(world: wire.World) -> None:
    assert isinstance(world.fabric, GroupFabric)
    world.fabric.end()


def body(world: wire.World) -> tuple[int, int]:
    """(threads that the axes' groups began, threads that are left of them at the end)."""
    before = threads()
    axis = wire.Mesh(world, {"data": world.size}, Ledger())["data"]
    axis.all_reduce(torch.ones(1000), "gradient").wait()
    axis.collect([1.0])
    during = threads()
    end_of(world)
    return during - before, threads() - before


def body_with_work_left(world: wire.World) -> int:
    axis = wire.Mesh(world, {"data": world.size}, Ledger())["data"]
    if world.rank == 0:
        axis.all_reduce(torch.ones(1000), "gradient")  # nobody answers: the end must not wait for it
    end_of(world)
    return axis.under_way


def test_the_threads_of_every_group_end(gloo: Processes) -> None:
    for began, left in gloo(2, body):
        assert began > 0
        assert left <= 0


def test_the_end_does_not_wait_for_what_nobody_answers(gloo: Processes) -> None:
    assert gloo(2, body_with_work_left, timeout=20) == [1, 0]
