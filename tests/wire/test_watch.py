"""Watch files: what a rank wrote is what the parent reads; a stall's culprit is the rank the others wait for."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from fourfold import wire
from fourfold.wire import watch
from fourfold.wire.watch import Sighting, Watch, culprits, path_of, read, read_all


def seen(rank: int, *, waiting: bool, axis: str = "data", number: int = 5, issued: int = 5) -> Sighting:
    return Sighting(rank, 100 + rank, 3, issued, waiting, axis, "all_reduce", number, 0)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    mine = Watch(tmp_path, 3)
    first = read(path_of(tmp_path, 3))
    assert (first.rank, first.pid, first.step, first.issued, first.waiting) == (3, os.getpid(), 0, 0, False)
    assert "no collective yet" in str(first)
    mine.issue(7, "z+data", "reduce_scatter", 1)
    mine.issue(7, "z", "all_gather", 1)
    mine.enter(7, "z+data", "reduce_scatter", 1)
    found = read(path_of(tmp_path, 3))
    assert (found.step, found.issued, found.waiting) == (7, 2, True)
    assert (found.axis, found.op, found.number) == ("z+data", "reduce_scatter", 1)
    assert found.at > first.at
    assert "rank 3, step 7, waits in reduce_scatter 1 on axis z+data" in str(found)
    mine.leave(7, "z+data", "reduce_scatter", 1)
    assert not read(path_of(tmp_path, 3)).waiting
    mine.close()
    assert read(path_of(tmp_path, 3)).step == 7, "the file outlives its writer"


def test_files_that_hold_no_record_are_named_or_left_out(tmp_path: Path) -> None:
    Watch(tmp_path, 0).close()
    path_of(tmp_path, 1).write_bytes(b"short")
    whole = bytearray(path_of(tmp_path, 0).read_bytes())
    whole[0] ^= 0xFF  # torn: the two versions differ
    path_of(tmp_path, 2).write_bytes(whole)
    with pytest.raises(wire.WireError, match="expected a watch file"):
        read(path_of(tmp_path, 1))
    with pytest.raises(wire.WireError, match="no complete record"):
        read(path_of(tmp_path, 2))
    with pytest.raises(OSError, match="rank-9"):
        read(path_of(tmp_path, 9))
    assert [one.rank for one in read_all(tmp_path)] == [0]


def test_reading_while_another_thread_writes_is_never_torn(tmp_path: Path) -> None:
    mine, stop = Watch(tmp_path, 0), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            mine.enter(number, "z", "all_gather", number)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            found = read(path_of(tmp_path, 0))
            assert found.step == found.number
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize(
    ("sightings", "who"),
    [
        ([seen(0, waiting=True), seen(1, waiting=False), seen(2, waiting=True)], [1]),
        ([seen(0, waiting=False), seen(1, waiting=False)], []),
        ([seen(0, waiting=True, number=6), seen(1, waiting=True, number=5)], [1]),
        ([seen(0, waiting=True, axis="z", issued=9), seen(1, waiting=True, axis="data", issued=8)], [1]),
        ([seen(0, waiting=True), seen(1, waiting=True)], []),
        ([], []),
    ],
    ids=["one computes", "all compute", "one is behind", "another axis", "a lost message", "none"],
)
def test_culprits(sightings: list[Sighting], who: list[int]) -> None:
    assert culprits(sightings) == who


def test_axes_tell_their_watch_and_errors_name_who_is_missing(tmp_path: Path) -> None:
    release = threading.Event()

    def body(world: wire.World) -> None:
        world.watch = Watch(tmp_path, world.rank)
        axis = wire.Mesh(world, {"data": 3})["data"]
        axis.ledger.begin(4)
        axis.all_reduce(torch.ones(3), "gradient").wait()
        if world.rank == 2:
            release.wait(10)
            return
        try:
            axis.all_reduce(torch.ones(3), "gradient").wait()
        finally:
            release.set()

    with pytest.raises(wire.RankFailed) as caught:
        wire.threads.launch(3, body, timeout=0.3)
    text = str(caught.value)
    assert "step 4: all_reduce 2 on axis data (ranks 0, 1, 2) failed" in text
    assert "rank 2, step 4, is not waiting; last: all_reduce 1 on axis data" in text
    records = {one.rank: one for one in read_all(tmp_path)}
    assert (records[2].issued, records[2].number, records[2].waiting) == (1, 1, False)
    assert watch.culprits([records[2], seen(0, waiting=True)]) == [2]
