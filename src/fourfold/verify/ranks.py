"""Run a case on ranks: threads of this process, or real gloo processes. As a program this file is one such process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

from fourfold.config import Loaded, load, resolved
from fourfold.verify.case import Case, Evidence, examine
from fourfold.verify.link import free_port
from fourfold.wire import join
from fourfold.wire.threads import launch


class RanksFailed(RuntimeError):
    """A rank did not bring its evidence: which, and what it said last."""


def on_threads(case: Case) -> list[Evidence]:
    """Every rank a thread; their evidence in rank order."""
    return launch(case.plan.world, examine, case)


def on_processes(loaded: Loaded, case: Case, timeout: float = 600.0) -> list[Evidence]:
    """Every rank a process that reads the same configuration; their evidence in rank order.

    Raises:
        RanksFailed: a rank failed, or took longer than `timeout` seconds; none is left behind.
    """
    with tempfile.TemporaryDirectory(prefix="fourfold-verify-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(resolved(loaded.config), encoding="utf-8")
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps(case.plan.to_dict()), encoding="utf-8")
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"WORLD_SIZE": str(case.plan.world), "OMP_NUM_THREADS": str(loaded.config.launch.threads)}
        processes = []
        try:
            for rank in range(case.plan.world):
                processes.append(_start(rank, Path(folder), case.steps, environment))
            _wait(processes, Path(folder), timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [
            Evidence.from_dict(json.loads((Path(folder) / f"rank-{rank}.json").read_text(encoding="utf-8")))
            for rank in range(case.plan.world)
        ]


def _start(rank: int, folder: Path, steps: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fourfold.verify.ranks", str(folder), str(steps)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    """Until all have ended well; the first that does not is the culprit."""
    deadline = monotonic() + timeout
    waiting = dict(enumerate(processes))
    while waiting:
        for rank, process in list(waiting.items()):
            try:
                code = process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
            del waiting[rank]
            if code:
                said = (folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace").strip()
                last = said.splitlines()[-1] if said else "nothing"
                raise RanksFailed(f"rank {rank} of {len(processes)} ended with {code}; it said last: {last}")
        if monotonic() > deadline:
            late = ", ".join(map(str, waiting))
            raise RanksFailed(f"rank {late} of {len(processes)} did not finish within {timeout:g} s")


def _one(folder: Path, steps: int) -> None:
    import torch

    from fourfold.plan import Plan
    from fourfold.verify.compare import case_of

    loaded = load(str(folder / "config.yaml"))
    torch.set_num_threads(loaded.config.launch.threads)
    plan = Plan.of(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
    world = join("gloo")
    evidence = examine(world, case_of(loaded.config, plan, steps))
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(evidence.to_dict()), encoding="utf-8")
    world.leave()


if __name__ == "__main__":
    _one(Path(sys.argv[1]), int(sys.argv[2]))
