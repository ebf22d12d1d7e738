"""Two runs never work in one folder."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fourfold.training.lock import LockError, locked


def hold(folder: Path, pipe: Connection) -> None:
    with locked(folder):
        pipe.send("held")
        pipe.recv()


def test_a_second_process_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    assert ours.recv() == "held"
    with pytest.raises(LockError, match=f"in use by process {process.pid}"), locked(tmp_path):
        pass
    process.kill()
    process.join()
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_it_can_be_taken_again_after_it_was_let_go(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path):
            assert (tmp_path / ".lock").exists()


def test_a_folder_that_cannot_be_written_is_named_with_the_reason_and_a_remedy(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    words = r"run\.folder: cannot write .*\.lock \(Is a directory\); set run\.folder to a place that can be written"
    with pytest.raises(LockError, match=words), locked(tmp_path):
        pass
