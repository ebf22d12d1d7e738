"""The processes of a local group: torchrun's elastic agent, in a thread, so that the caller stays free to watch."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from fourfold import torch_private

LOOPBACK = "127.0.0.1"
SHUTDOWN = 3
"""Seconds that workers have to end by themselves once the group is being ended."""


class Agent:
    """Starts `size` processes, starts all of them again when one fails, and says what came of each group.

    Attributes:
        failed: exit codes of the ranks that failed, one entry for each group that failed, in order.
    """

    def __init__(
        self, command: Sequence[str], size: int, *, restarts: int, address: str | None, logs: Path, name: str
    ) -> None:
        """Prepare; nothing is started.

        Args:
            command: arguments to this Python.
            size: how many processes.
            restarts: how often a failed group is started again.
            address: host:port of the meeting point; None: a free port on loopback.
            logs: folder for what they print: one file a stream, rank and group.
            name: of the run, for the meeting point.
        """
        self.failed: list[dict[int, int]] = []
        self.error: BaseException | None = None
        self.ok = False
        self._given_up = False
        self._command, self._size, self._restarts = list(command), size, restarts
        self._address, self._logs, self._name = address or f"{LOOPBACK}:0", logs, name
        self._thread = threading.Thread(target=self._run, name="elastic agent", daemon=True)

    def start(self) -> None:
        """Start the processes, and watch them in a thread."""
        _log_to(self._logs / "agent.log")
        self._thread.start()

    @property
    def running(self) -> bool:
        """Some process may still live, or be started again."""
        return self._thread.is_alive()

    def give_up(self) -> None:
        """Somebody wishes to stop: a group that fails from now on is not started again."""
        self._given_up = True

    def join(self, seconds: float) -> None:
        """Wait at most so long for the end."""
        self._thread.join(seconds)

    def output(self, attempt: int, rank: int) -> Path | None:
        """What a rank of a group printed on its error stream."""
        found = sorted(self._logs.glob(f"*/attempt_{attempt}/{rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
        return found[-1] if found else None

    def _run(self) -> None:
        try:
            result = self._agent().run()
            self.ok = not result.is_failed()
        except BaseException as error:  # told to whoever waits for the group
            self.error = error

    def _agent(self):
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=self._address,
            run_id=self._name,
            min_nodes=1,
            max_nodes=1,
            local_addr=LOOPBACK,
            is_host=True,
        )
        spec = WorkerSpec(
            role="rank",
            local_world_size=self._size,
            entrypoint=sys.executable,
            args=tuple(self._command),
            rdzv_handler=get_rendezvous_handler(parameters),
            max_restarts=self._restarts,
            monitor_interval=0.1,
            local_addr=LOOPBACK,
        )
        logs = DefaultLogsSpecs(log_dir=str(self._logs), redirects=Std.ALL)
        return torch_private.reporting_agent(spec, logs, shutdown_timeout=SHUTDOWN, on_failure=self._told)

    def _told(self, codes: dict[int, int]) -> bool:
        self.failed.append(codes)
        return self._given_up


def _log_to(path: Path) -> None:
    """The agent's own log goes to a file: on the screen it would bury the cause of a failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("torch.distributed.elastic")
    for handler in list(logger.handlers):
        if isinstance(handler, logging.FileHandler):
            logger.removeHandler(handler)
            handler.close()
    logger.addHandler(logging.FileHandler(path, encoding="utf-8"))
    logger.propagate = False
