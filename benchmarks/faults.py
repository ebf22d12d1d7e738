"""What happens when a rank goes wrong, and how long it takes. It holds when every row takes at most 15 s.

    python benchmarks/faults.py

Four rows are two gloo processes, one of which raises, is killed, aborts inside the backend or stands still in its
fourth step: seconds from that moment until no process of the group lives, and the one line that names the culprit. A
stall counts from the moment at which the rank stands still, the patience of `launch.stall_after` (5 s here) included.
The last row kills one of four gloo workers of a real run under `launch.max_restarts`: seconds from the kill until the
group is back, which is when the first step after it is in the journal.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from fourfold.config import load
from fourfold.training.agent import Agent
from fourfold.training.data import synthetic
from fourfold.training.folder import RunFolder
from fourfold.training.journal import read
from fourfold.training.launch import train
from fourfold.training.process import living
from fourfold.training.supervisor import Supervisor

BOUND = 15.0
STALL_AFTER = 5.0
FAULTY = Path(__file__).resolve().parents[1] / "tests" / "training" / "launch" / "faulty_rank.py"
FAULTS = ("raise", "kill", "abort", "stall")
SETTINGS = """
model: {layers: 2, width: 16, heads: 2, context: 8, dropout: 0.1}
data: {name: tokens, files: [tokens.npy], sequence: 8, vocabulary: 40, held_out: 0.1}
train: {steps: 60, batch: 8}
plan: {placement: {data: 2, z: 2, shard: parameters}}
run: {name: killed, tensorboard: false, checkpoint_every: 5}
launch: {max_restarts: 1}
"""


@dataclass(frozen=True)
class Row:
    """One fault: what it was, how long it took, what was said, and whether all went as it must."""

    fault: str
    seconds: float
    said: str
    well: bool

    @property
    def holds(self) -> bool:
        """Within the bound, the culprit named, nobody left."""
        return self.well and self.seconds <= BOUND


def fault(kind: str, folder: Path) -> Row:
    """Two ranks, the second of which goes wrong in step 3."""
    settings = {"fault": kind, "rank": 1, "step": 3, "steps": 6, "attempts": 1, "pause": 0.0}
    command = [str(FAULTY), str(folder), json.dumps(settings)]
    agent = Agent(command, 2, restarts=0, address=None, logs=folder / "logs", name=kind)
    supervisor = Supervisor(agent, RunFolder(folder), 2, stall_after=STALL_AFTER, screens=[])
    well = not supervisor.run()
    gone = time.time()
    left = [process for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or [])]
    (failure,) = supervisor.failures
    # Of two ranks that disagree about a size, either may be the one whose backend aborts.
    named = failure.step == 3 and (failure.rank == 1 or kind == "abort")
    return Row(kind, gone - float((folder / "fault").read_text()), str(failure), well and named and not left)


def restart(folder: Path) -> Row:
    """One of four workers of a real run is killed after its twelfth step."""
    np.save(folder / "tokens.npy", synthetic(3000, 40))
    (folder / "config.yaml").write_text(SETTINGS)
    place = RunFolder(folder / "runs" / "killed")
    times: list[float] = []
    killer = threading.Thread(target=_kill_and_wait, args=(place, times), daemon=True)
    killer.start()
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        outcome = train(load("config.yaml"))
    killer.join(timeout=BOUND)
    killed, back = times
    said = "; ".join(map(str, outcome.failures))
    return Row("restart", back - killed, said, outcome.ok and [one.rank for one in outcome.failures] == [2])


def _kill_and_wait(place: RunFolder, times: list[float]) -> None:
    while _steps(place) < 12:
        time.sleep(0.02)
    os.kill(living(place.ranks(0))[2], signal.SIGKILL)
    times.append(time.time())
    while not any(record["kind"] == "resume" for record in read(place.journal)):
        time.sleep(0.02)
    resumed = _steps(place)
    while _steps(place) <= resumed:
        time.sleep(0.02)
    times.append(time.time())


def _steps(place: RunFolder) -> int:
    return sum(record["kind"] == "step" for record in read(place.journal))


def main() -> int:
    """Print a row for each fault; 0 if all hold."""
    rows = []
    for kind in (*FAULTS, "restart"):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(restart(Path(folder)) if kind == "restart" else fault(kind, Path(folder)))
            row = rows[-1]
            print(f"{row.fault:8} {row.seconds:6.1f} s  {'holds' if row.holds else 'FAILS'}  {row.said}", flush=True)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
