"""A rank that all-reduces over gloo and, in one step, goes wrong in one way. Run by the launch tests as a process."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold.ledger import Ledger
from fourfold.training.folder import RunFolder
from fourfold.training.process import as_rank, leave
from fourfold.training.stop import Stop
from fourfold.wire import Mesh, join
from fourfold.wire.watch import Watch


class RankTrouble(RuntimeError):
    """What the `raise` fault raises."""


def trouble(fault: str) -> None:
    if fault == "raise":
        raise RankTrouble("the seventh value is wrong")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stall":
        time.sleep(600)
    if fault == "abort":  # another size than the peers': gloo aborts the process, no exception is raised
        dist.all_reduce(torch.ones(1_000_003))


def main() -> int:
    folder, settings = RunFolder(Path(sys.argv[1])), json.loads(sys.argv[2])
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    at: dict[str, int | None] = {"step": None}
    with Stop() as stop:

        def work() -> None:
            watch = Watch(folder.ranks(attempt), rank)
            world = join("gloo", timeout=60)
            world.watch = watch
            ledger = Ledger(rank=rank)
            axis = Mesh(world, {"data": world.size}, ledger)["data"]
            for step in range(settings["steps"]):
                at["step"] = step
                ledger.begin(step)
                watch.step(step)
                if (rank, step) == (settings["rank"], settings["step"]) and attempt < settings["attempts"]:
                    (folder.path / "fault").write_text(str(time.time()))
                    trouble(settings["fault"])
                elif settings["fault"] == "abort" and step == settings["step"]:
                    dist.all_reduce(torch.ones(5))
                axis.all_reduce(torch.ones(1000), "gradient").wait()
                (folder.path / f"reached-{rank}").write_text(f"{attempt} {step}")
                if any(wish for (wish,) in axis.collect([float(stop())])):
                    (folder.path / f"stopped-{rank}").touch()
                    return
                time.sleep(settings["pause"])

        return as_rank(folder.ranks(attempt), rank, work, lambda: at["step"])


if __name__ == "__main__":
    leave(main())
