"""The journal: one line a record, cut back on resume, followed by another process."""

import json

import pytest

from fourfold.cli import failure
from fourfold.config import Config
from fourfold.config.schema import RunFolder as Settings
from fourfold.report import ReportError, recorded
from fourfold.training import folder
from fourfold.training.journal import Follower, Journal, JournalError, read, truncate


def written(path, steps):
    journal = Journal(path)
    for step in steps:
        journal.write("step", step, loss=1 / step)
    journal.close()


def test_a_record_is_one_line_of_json_and_reaches_the_file_at_once(tmp_path):
    journal = Journal(tmp_path / "run" / "journal.jsonl")
    journal.write("start", 0, ranks=2)
    journal.write("step", 1, loss=2.5)
    lines = (tmp_path / "run" / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"kind": "start", "step": 0, "ranks": 2},
        {"kind": "step", "step": 1, "loss": 2.5},
    ]


def test_resuming_cuts_back_to_the_step_and_goes_on(tmp_path):
    path = tmp_path / "journal.jsonl"
    written(path, range(1, 8))
    Journal(path).write("end", 7)
    truncate(path, 4, "step-00000004")
    written(path, range(5, 7))
    assert [record["step"] for record in read(path) if record["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [record for record in read(path) if record["kind"] != "step"] == [
        {"kind": "resume", "step": 4, "path": "step-00000004"}
    ]


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "journal.jsonl"
    written(path, range(1, 3))
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    assert [record["step"] for record in read(path)] == [1, 2]
    truncate(path, 9, None)
    assert path.read_text().count("\n") == 3
    assert read(tmp_path / "none.jsonl") == []


def test_a_follower_sees_each_record_once(tmp_path):
    path = tmp_path / "journal.jsonl"
    follower = Follower(path)
    assert follower.poll() == []
    written(path, [1, 2])
    assert [record["step"] for record in follower.poll()] == [1, 2]
    assert follower.poll() == []
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 3')
        file.flush()
        assert follower.poll() == []
        file.write("}\n")
    assert [record["step"] for record in follower.poll()] == [3]


def test_a_follower_survives_a_truncation_and_repeats_nothing(tmp_path):
    path = tmp_path / "journal.jsonl"
    written(path, range(1, 6))
    follower = Follower(path, old=True)
    assert len(follower.poll()) == 5
    truncate(path, 3, None)
    written(path, [4])
    assert [(record["kind"], record["step"]) for record in follower.poll()] == [("resume", 3), ("step", 4)]
    written(path, [5])
    assert [record["step"] for record in follower.poll()] == [5]


@pytest.mark.parametrize("seen", [False, True], ids=["unseen", "seen"])
def test_a_follower_shows_no_old_record_after_a_second_truncation(tmp_path, seen):
    """The `resume` of the first restart is older than the second cut: it begins nothing new."""
    path = tmp_path / "journal.jsonl"
    written(path, range(1, 6))
    follower = Follower(path, old=True)
    assert len(follower.poll()) == 5
    truncate(path, 3, None)
    written(path, [4, 5])
    if seen:
        assert [record["step"] for record in follower.poll()] == [3, 4, 5]
    truncate(path, 4, None)
    written(path, [5])
    assert [(record["kind"], record["step"]) for record in follower.poll()] == [("resume", 4), ("step", 5)]


def test_a_follower_of_a_resumed_run_starts_at_its_end(tmp_path):
    path = tmp_path / "journal.jsonl"
    written(path, range(1, 6))
    follower = Follower(path)
    assert follower.poll() == []
    written(path, [6])
    assert [record["step"] for record in follower.poll()] == [6]


GARBLED = {
    "no JSON": b'{"kind": "step", "st\x00\x00}',
    "no UTF-8": b'{"kind": "step", "step": 3, "note": "\xff\xfe"}',
    "no object": b"42",
    "no record": b'{"loss": 2.5}',
    "no step": b'{"kind": "step", "step": "three"}',
    "no end": b"[" * 100_000,
}


@pytest.mark.parametrize("line", GARBLED.values(), ids=GARBLED)
def test_a_garbled_line_is_named(tmp_path, line):
    path = tmp_path / "journal.jsonl"
    written(path, [1, 2])
    with path.open("ab") as file:
        file.write(line + b"\n")
    written(path, [4])
    for reading in (lambda: read(path), lambda: truncate(path, 4, None), Follower(path, old=True).poll):
        with pytest.raises(JournalError, match=r"journal\.jsonl, line 3: expected .* delete this line") as caught:
            reading()
        assert len(str(caught.value)) < 400 + len(str(path))
    assert path.read_bytes().count(b"\n") == 4


def test_a_follower_counts_the_lines_that_it_did_not_read(tmp_path):
    path = tmp_path / "journal.jsonl"
    written(path, range(1, 6))
    follower = Follower(path)
    written(path, [6])
    assert [record["step"] for record in follower.poll()] == [6]
    with path.open("a") as file:
        file.write("rubbish\n")
    with pytest.raises(JournalError, match="line 7: .* found 'rubbish'"):
        follower.poll()
    written(path, [7])
    assert [record["step"] for record in follower.poll()] == [7]
    path.write_text(path.read_text().replace("rubbish\n", ""))
    assert [record["step"] for record in read(path)] == [1, 2, 3, 4, 5, 6, 7]


def test_resuming_a_run_with_a_garbled_journal_is_a_users_error_and_goes_on_without_the_line(tmp_path, capsys):
    before = Config(run=Settings(folder=str(tmp_path), name="mine"))
    place = folder.create(before)
    place.write_config(before)
    place.journal.write_bytes(b'{"kind": "start", "step": 0}\n\x00\x00rubbish\n{"kind": "step", "step": 1}\n')
    again = Config(run=Settings(folder=str(tmp_path), name="mine", resume=True))
    with pytest.raises(JournalError) as caught:
        folder.check(again)
    assert failure.report(caught.value, as_json=False) == failure.BAD_INPUT
    said = capsys.readouterr().err
    assert f"{place.journal}, line 2: " in said and "delete this line" in said and "defect" not in said
    place.journal.write_bytes(b'{"kind": "start", "step": 0}\n{"kind": "step", "step": 1}\n')
    folder.check(again)


def test_a_report_of_a_garbled_journal_names_the_line(tmp_path, capsys):
    path = tmp_path / "mine" / "journal.jsonl"
    written(path, [1])
    with path.open("a") as file:
        file.write("rubbish\n")
    with pytest.raises(ReportError) as caught:
        recorded.read(path.parent)
    assert failure.report(caught.value, as_json=False) == failure.BAD_INPUT
    said = capsys.readouterr().err
    assert "journal.jsonl, line 2: expected a JSON object" in said and "delete this line" in said
