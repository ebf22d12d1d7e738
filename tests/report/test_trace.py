"""The trace against the rules of the Chrome trace event format."""

import gzip
import json

from fourfold.ledger import Ledger
from fourfold.report import trace, write

AXES = {"x": 1, "y": 1, "z": 2, "data": 2, "pipe": 1}
NEEDED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}


def events_of(folder):
    report = write(folder)
    assert report.trace == folder / "trace.json.gz"
    return json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]


def test_events_have_the_fields_that_their_phase_needs(run_folder):
    events = events_of(run_folder)
    assert {event["ph"] for event in events} == set(NEEDED)
    for event in events:
        assert set(event) - {"ph"} == NEEDED[event["ph"]]
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0


def test_a_process_a_rank_a_thread_a_lane(run_folder):
    events = events_of(run_folder)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(rank, tid): lane for rank in range(2) for tid, lane in enumerate(["step", "data", "wire:z"])}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert sum(e["ph"] == "X" for e in events) == 2 * 3 * (1 + 4 + 1)
    sent = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert sent == [4000 * n for n in range(1, 13)]


def test_arrows_join_the_same_collective_of_one_group():
    ledgers = {}
    for rank in range(4):  # z = 2, data = 2: over data, ranks 0 and 2 meet, and 1 and 3
        ledger = ledgers[rank] = Ledger(rank=rank, recording=True)
        ledger.span("wire:data", "all_reduce", 10 + rank, 20 + rank, bytes=4)
        ledger.span("wire:z", "all_gather", 30, 40, bytes=4)
        ledger.span("wire:z+data", "all_gather", 50, 60, bytes=4)
        ledger.span("wire:z+data/2", "all_gather", 70, 80, bytes=4)  # halves of the product: ranks 0, 1 and 2, 3
    arrows = {}
    for event in trace.trace(ledgers, AXES):
        if event["ph"] in "sf":
            arrows.setdefault((event["cat"], event["id"]), {})[event["ph"]] = event["pid"]
    found = sorted((lane, ends["s"], ends["f"]) for (lane, _), ends in arrows.items())
    assert found == [
        ("wire:data", 0, 2),
        ("wire:data", 1, 3),
        ("wire:z", 0, 1),
        ("wire:z", 2, 3),
        ("wire:z+data", 0, 1),
        ("wire:z+data", 0, 2),
        ("wire:z+data", 0, 3),
        ("wire:z+data/2", 0, 1),
        ("wire:z+data/2", 2, 3),
    ]


def test_equal_ledgers_give_equal_bytes(run_folder, synthetic, tmp_path):
    other = synthetic["write_run"](tmp_path / "another")
    write(run_folder)
    write(other)
    assert (run_folder / "trace.json.gz").read_bytes() == (other / "trace.json.gz").read_bytes()
