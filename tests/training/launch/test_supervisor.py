"""Real gloo processes that raise, die, abort and stall: all end, and one line names the culprit."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from fourfold.training.agent import Agent
from fourfold.training.folder import RunFolder
from fourfold.training.process import living
from fourfold.training.supervisor import Supervisor
from fourfold.wire import watch

FAULTY = Path(__file__).with_name("faulty_rank.py")


def supervised(folder: Path, size: int, *, restarts: int = 0, stall_after: float = 60.0, **settings) -> Supervisor:
    settings = {"fault": "none", "rank": 1, "step": 3, "steps": 6, "attempts": 1, "pause": 0.0} | settings
    command = [str(FAULTY), str(folder), json.dumps(settings)]
    agent = Agent(command, size, restarts=restarts, address=None, logs=folder / "logs", name="test")
    return Supervisor(agent, RunFolder(folder), size, stall_after=stall_after, screens=[])


def nobody_is_left(folder: Path) -> bool:
    """No process of this run lives: none that a watch file names, none that has the folder on its command line."""
    pids = {sighting.pid for attempt in folder.glob("ranks/*") for sighting in watch.read_all(attempt)}
    return not [
        process
        for process in psutil.process_iter(["pid", "cmdline", "status"])
        if (process.info["pid"] in pids or str(folder) in (process.info["cmdline"] or []))
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", r"rank 1, step 3: RankTrouble: the seventh value is wrong \(see .*1\.traceback\.txt\)"),
        ("kill", r"rank 1, step 3: killed by SIGKILL: somebody's kill -9, or the system ran out of memory"),
        (
            "abort",
            r"rank [01], step 3: (aborted \(SIGABRT\), mostly inside the communication backend|.*(size|Enforce))",
        ),
    ],
)
def test_one_line_names_rank_step_and_reason(tmp_path, fault, said):
    supervisor = supervised(tmp_path, 2, fault=fault)
    assert not supervisor.run()
    (failure,) = supervisor.failures
    assert re.match(said, str(failure))
    assert "\n" not in str(failure)
    assert nobody_is_left(tmp_path)


def test_a_stalled_rank_is_named_and_all_are_ended(tmp_path):
    supervisor = supervised(tmp_path, 3, fault="stall", rank=2, stall_after=3.0)
    assert not supervisor.run()
    (failure,) = supervisor.failures
    assert re.match(
        r"rank 2, step 3: stalled: no progress for 3 s while others wait \(rank 0, step 3, waits in", str(failure)
    )
    assert nobody_is_left(tmp_path)


def test_a_group_that_ends_well_leaves_nothing_to_say(tmp_path):
    supervisor = supervised(tmp_path, 2)
    assert supervisor.run()
    assert supervisor.failures == []
    assert living(tmp_path / "ranks" / "0") == {}
    assert (tmp_path / "reached-1").read_text() == "0 5"


def test_four_gloo_ranks_come_back_after_one_was_killed(tmp_path):
    supervisor = supervised(tmp_path, 4, fault="kill", restarts=2)
    assert supervisor.run()
    assert [str(failure).split(":")[0] for failure in supervisor.failures] == ["rank 1, step 3"]
    assert {(tmp_path / f"reached-{rank}").read_text() for rank in range(4)} == {"1 5"}


def test_every_restart_is_accounted_for_until_there_are_none_left(tmp_path):
    supervisor = supervised(tmp_path, 2, fault="raise", restarts=1, attempts=9)
    assert not supervisor.run()
    assert [failure.rank for failure in supervisor.failures] == [1, 1]
    assert nobody_is_left(tmp_path)


def test_a_signal_reaches_every_rank_and_they_stop_at_one_step(tmp_path):
    supervisor = supervised(tmp_path, 2, steps=10_000, pause=0.02)

    def interrupt() -> None:
        while not (tmp_path / "reached-1").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert supervisor.run()
    assert (tmp_path / "stopped-0").exists()
    assert (tmp_path / "stopped-1").exists()
    assert (tmp_path / "reached-0").read_text() == (tmp_path / "reached-1").read_text()


def test_ranks_do_not_outlive_a_killed_parent(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(FAULTY.parent)!r})\n"
        "from pathlib import Path; from test_supervisor import supervised\n"
        f"supervised(Path({str(tmp_path)!r}), 2, steps=10_000, pause=0.05).run()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "reached-1").exists():
        assert parent.poll() is None
        time.sleep(0.05)
    pids = living(tmp_path / "ranks" / "0").values()
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=15)
    assert nobody_is_left(tmp_path)
