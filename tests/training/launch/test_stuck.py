"""A collective that is stuck never outlives a signal: real signals to real processes, on threads and on gloo.

The time-outs of the runs are 600 s; the ones below only keep a test that fails from hanging.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from fourfold.config import Config, resolved
from fourfold.training.data import synthetic

HERE = Path(__file__).parent
STARTING, ENDING = 120.0, 30.0


def started(script: str, *arguments: object, until: Path) -> subprocess.Popen:
    """The script's process, once it has written `until`."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + STARTING
    while not until.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"{script} did not get stuck: {process.communicate()[0]}")
        time.sleep(0.05)
    time.sleep(1.0)  # now it waits
    return process


def ended(process: subprocess.Popen, *numbers: signal.Signals) -> str:
    """What the process printed, after these signals have ended it and all of its children."""
    children = psutil.Process(process.pid).children(recursive=True)
    try:
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.5)
        said = process.communicate(timeout=ENDING)[0]
        _, left = psutil.wait_procs(children, timeout=ENDING)
        assert not left
        return said
    finally:
        for one in [process, *children]:
            if one.is_running() if isinstance(one, psutil.Process) else one.poll() is None:
                one.kill()


def threads_run(folder: Path) -> subprocess.Popen:
    np.save(folder / "tokens.npy", synthetic(2000, 40))
    config = {
        "model": {"layers": 1, "width": 16, "heads": 2, "context": 8, "dropout": 0.0},
        "data": {"name": "tokens", "files": [str(folder / "tokens.npy")], "sequence": 8, "vocabulary": 40},
        "train": {"steps": 6, "batch": 8},
        "plan": {"placement": {"z": 2, "data": 2, "shard": "parameters"}},
        "launch": {"backend": "threads", "stall_after": 600},
        "run": {"folder": str(folder / "runs"), "tensorboard": False},
    }
    (folder / "config.yaml").write_text(resolved(Config.model_validate(config)))
    return started("stuck_threads.py", folder / "config.yaml", folder / "stuck", until=folder / "stuck")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_thread_ranks_that_are_stuck_and_the_collective_is_named(tmp_path, number):
    process = threads_run(tmp_path)
    said = ended(process, number)
    assert process.returncode == 3, said
    assert "did not enter it within 8 s, after a signal to stop" in said


def test_a_second_signal_ends_thread_ranks_at_once(tmp_path):
    process = threads_run(tmp_path)
    ended(process, signal.SIGTERM, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM


def test_a_signal_ends_gloo_ranks_that_are_stuck_and_nothing_is_started_again(tmp_path):
    process = started("stuck_group.py", tmp_path, until=tmp_path / "stuck")
    said = ended(process, signal.SIGTERM)
    assert process.returncode == 0, said
    assert "ended well: False" in said
    assert "rank 1, step 2: stalled: no progress for 8 s while others wait (rank 0, step 2, waits in" in said
    assert "a signal had asked the run to stop, so it was ended" in said
    assert not (tmp_path / "ranks" / "1").exists()


def test_a_second_signal_ends_the_parent_at_once_and_its_ranks_with_it(tmp_path):
    process = started("stuck_group.py", tmp_path, until=tmp_path / "stuck")
    ended(process, signal.SIGTERM, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
