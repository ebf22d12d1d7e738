"""Supervises ranks that get stuck; prints what came of it. Run by `test_stuck.py` as a process."""

import sys
from pathlib import Path

from fourfold.training.agent import Agent
from fourfold.training.folder import RunFolder
from fourfold.training.supervisor import Supervisor

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    command = [str(Path(__file__).with_name("stuck_rank.py")), str(folder)]
    agent = Agent(command, 2, restarts=3, address=None, logs=folder / "logs", name="stuck")
    supervisor = Supervisor(agent, RunFolder(folder), 2, stall_after=600.0, screens=[])
    print("ended well:", supervisor.run())
    print(*supervisor.failures, sep="\n")
