"""A pool of real processes that become gloo ranks: started once a test session, used by the `gloo` fixture."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

GRACE = 2.0
"""Seconds that the other ranks get to tell what they saw, once one has failed."""


class ProcessFailed(RuntimeError):
    """A rank raised, died, or did not return in time. `rank` is the culprit, `reports` what each rank said."""

    def __init__(self, message: str, rank: int, reports: dict[int, str]) -> None:
        super().__init__(message)
        self.rank, self.reports = rank, reports


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection


class Processes:
    """Starts workers when they are first needed and keeps them; after a failure all are killed and started anew."""

    def __init__(self) -> None:
        # One server imports torch and what most bodies use; each worker is a fork of it (some 4 s of import saved).
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "fourfold.wire", "fourfold.training.run", "torch._dynamo"])
        self._workers: list[_Worker] = []
        self._store: Any = None
        self._runs = 0

    def __call__(
        self, size: int, body: Callable[..., Any], *args: Any, timeout: float = 60.0, patience: float | None = None
    ) -> list[Any]:
        """Run `body(world, *args)` on `size` gloo ranks, one thread each; results in rank order.

        `timeout` is for the whole run, `patience` (the same, if None) for each collective.
        `body` is a function at the top of its module; arguments and results are tensors and plain values.

        Raises:
            ProcessFailed: names the first rank that raised or died, or those that were missing at the time-out.
        """
        if self._store is None:
            self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                "127.0.0.1", 0, None, True, timedelta(seconds=timeout), wait_for_workers=False
            )
        self._runs += 1
        while len(self._workers) < size:
            self._start()
        for rank, worker in enumerate(self._workers[:size]):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": f"tests {os.getpid()}",
                "TORCHELASTIC_RESTART_COUNT": str(self._runs),
            }
            with contextlib.suppress(ConnectionError):  # a worker that died is named below
                worker.pipe.send((inspect.getfile(body), body.__qualname__, environment, patience or timeout, args))
        return self._results(size, body.__qualname__, timeout)

    def close(self) -> None:
        """End every worker."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours))

    def _results(self, size: int, name: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        reports: dict[int, str] = {}
        pipes: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(self._workers[:size])}
        deadline = time.monotonic() + timeout
        while pipes and (ready := wait(list(pipes), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = pipes.pop(pipe)
                fine, value = self._answer(rank, pipe)
                (results if fine else reports)[rank] = value
            if reports:
                deadline = min(deadline, time.monotonic() + GRACE)
        if not pipes and not reports:
            return [results[rank] for rank in range(size)]
        self.close()
        missing = sorted(pipes.values())
        for rank in missing:
            reports.setdefault(rank, f"did not return within {timeout:g} s" if not reports else "was still running")
        rank, reason = next(iter(reports.items()))
        raise ProcessFailed(f"{name} on {size} ranks: rank {rank} {reason}", rank, reports)

    def _answer(self, rank: int, pipe: Any) -> tuple[bool, Any]:
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            process = self._workers[rank].process
            process.join(GRACE)
            return False, f"died with exit code {process.exitcode}"


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            path, name, environment, timeout, args = pipe.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            pipe.send((True, _run(path, name, timeout, args)))
        except Exception:
            pipe.send((False, f"raised:\n{traceback.format_exc()}"))


def _run(path: str, name: str, timeout: float, args: tuple[Any, ...]) -> Any:
    from fourfold import wire

    body = getattr(_module(path), name)
    world = wire.join("gloo", timeout=timeout)
    try:
        return body(world, *args)
    finally:
        world.leave()


def _module(path: str) -> Any:
    name = f"ranks:{path}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
