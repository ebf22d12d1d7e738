"""Joining: a world of one without torchrun, and environments that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from fourfold import wire
from fourfold.wire.backends import process_group
from fourfold.wire.watch import path_of, read


def test_without_torchrun_there_is_one_rank_and_no_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = wire.join(watch=tmp_path)
    assert (world.rank, world.size, world.backend) == (0, 1, "alone")
    assert not dist.is_initialized()
    assert read(path_of(tmp_path, 0)).rank == 0
    world.leave()
    world.leave()
    assert world.watch is None


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0"}, "whole number in WORLD_SIZE, found None; start the ranks by torchrun"),
        ({"WORLD_SIZE": "2"}, "whole number in RANK, found None"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "whole number in RANK, found 'two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 is not one of WORLD_SIZE = 2 ranks"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "whole number in MASTER_PORT, found None"),
    ],
)
def test_environments_that_cannot_be(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], says: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(wire.UsageError, match=says):
        wire.join()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(wire.UsageError, match="expected one of auto, gloo, nccl, found 'mpi'"):
        wire.join("mpi")


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("10.77.0.1", False), ("node-3", False)],
)
def test_only_a_loopback_address_binds_the_ranks_to_lo(address: str, loopback: bool) -> None:
    assert process_group.is_loopback(address) is loopback
