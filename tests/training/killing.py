"""Real `fourfold train` commands on two gloo workers that are killed, parent and workers together, and resumed.

One interpreter imports everything once, and each command is a fork of it: `killing.py CONFIG SEED KILLS` prints one
JSON line for each start.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fourfold.cli import main
from fourfold.config import load
from fourfold.training import checkpoint, launch
from fourfold.training.checkpoint.layout import leftovers
from fourfold.training.folder import RunFolder
from fourfold.training.journal import read
from fourfold.training.process import living

IMPORTED = (launch,)
"""What the forks need, imported before them."""
PATIENCE = 120.0
"""Seconds in which a run must come to the moment at which it is killed."""
POLL = 0.002
EVER = 10**9
"""More than any run takes."""


class Command:
    """One run, started as a command again and again; every start but the last is killed."""

    def __init__(self, config: Path, seed: int) -> None:
        """Prepare; nothing is started."""
        run = load(str(config)).config.run
        assert run.name is not None
        self.config, self.folder = config, RunFolder(Path(run.folder) / run.name)
        self._draw = random.Random(seed)
        self._inode = self._kept = 0

    def start(self, *more: str) -> int:
        """Fork a `fourfold train`, whose output goes nowhere. Returns the process."""
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                code = main(["train", str(self.config), *more])
            os._exit(code)
        return child

    def kill(self, child: int) -> dict[str, object]:
        """SIGKILL to the command and to its workers, a few steps after it began: at once, or inside of a save."""
        self._until(child, self._begun)
        resumed = self.resumed()
        step = self._step() + self._draw.randint(1, 6)
        self._until(child, lambda: self._step() >= step)
        if self._draw.random() < 0.5:
            self._until(child, lambda: bool(leftovers(self.folder.checkpoints)))
        else:
            time.sleep(self._draw.uniform(0.0, 0.02))
        workers = living(self.folder.ranks(0)).values()
        for process in (child, *workers):
            os.kill(process, signal.SIGKILL)
        os.waitpid(child, 0)
        self._inode = self.folder.journal.stat().st_ino
        newest = checkpoint.latest(self.folder.checkpoints)
        self._kept = self._starts(int(newest.name.removeprefix("step-")) if newest else 0)
        return {
            "killed": len(workers),
            "resumed": resumed,
            "step": self._step(),
            "torn": [path.name for path in leftovers(self.folder.checkpoints)],
            "newest": newest and newest.name,
        }

    def resumed(self) -> str | None:
        """The checkpoint from which the newest start went on."""
        records = read(self.folder.journal)
        paths = [Path(record["path"]).name for record in records if record["kind"] == "resume" and record["path"]]
        return paths[-1] if paths else None

    def _begun(self) -> bool:
        """This start has written into the journal, beside the starts before it that are left in it.

        A resumed one first cuts the journal back to its checkpoint, which makes another file of it.
        """
        journal = self.folder.journal
        if not journal.exists() or journal.stat().st_ino == self._inode:
            return False
        return self._starts(EVER) > self._kept

    def _starts(self, step: int) -> int:
        """How many starts at or before a step are in the journal."""
        return sum(record["kind"] == "start" and record["step"] <= step for record in read(self.folder.journal))

    def _step(self) -> int:
        return max((record["step"] for record in read(self.folder.journal)), default=0)

    def _until(self, child: int, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not there():
            if time.monotonic() > deadline or os.waitpid(child, os.WNOHANG)[0]:
                raise SystemExit(f"{self.folder.path}: the command ended or stood still before it could be killed")
            time.sleep(POLL)


def body(config: Path, seed: int, kills: int) -> None:
    """Start, kill, resume, kill, …, and let the last one end."""
    command = Command(config, seed)
    child = command.start()
    for _ in range(kills):
        print(json.dumps(command.kill(child)), flush=True)
        child = command.start("--resume")
    _, status = os.waitpid(child, 0)
    print(json.dumps({"exit": os.waitstatus_to_exitcode(status), "resumed": command.resumed()}), flush=True)


if __name__ == "__main__":
    body(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
