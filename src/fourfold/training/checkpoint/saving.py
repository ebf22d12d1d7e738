"""Saving, as a rank sees it: values are copied at once, the rest runs beside training, errors reach the caller."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fourfold.training.checkpoint import layout, part
from fourfold.training.checkpoint.box import Box
from fourfold.training.checkpoint.coordination import Job
from fourfold.training.checkpoint.errors import CheckpointError
from fourfold.training.checkpoint.state import encode

_log = logging.getLogger(__name__)


class Saving:
    """A save that may still be running."""

    def __init__(self, path: Path) -> None:
        """A save that is already done; `_start` gives it something to do."""
        self.path = path
        """Where the checkpoint lies once `wait` has returned."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._told = False

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; never blocks."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Block until the checkpoint is on the disk under its final name; every writer's `wait` means the whole of it.

        Raises:
            CheckpointError: it could not be saved; says why.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error
        return self.path

    def _start(self, job: Job) -> None:
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"save-step-{job.step}", daemon=True)
        self._thread.start()

    def _run(self, job: Job) -> None:
        try:
            job.run()
        except Exception as error:
            self._error = error

    def _surface(self) -> None:
        """Wait, and raise an error that nobody has been told yet."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and not self._told:
            self.wait()


_running: dict[tuple[Path, int], Saving] = {}
"""The last save of every (folder, rank) of this process: only one runs at a time, and its error must reach someone."""


def save(
    folder: Path,
    step: int,
    boxes: Sequence[Box],
    state: Mapping[str, Any],
    *,
    rank: int,
    writers: Sequence[int],
    asynchronous: bool = True,
    keep: int = 3,
    timeout: float = 600.0,
) -> Saving:
    """Save this rank's boxes as its part of the checkpoint of `step`. Every writer calls it.

    Values and state are copied before it returns. A save of this rank that still runs is waited for first, and its
    error is raised here.

    Args:
        folder: of all checkpoints of the run, seen by every writer.
        step: optimizer steps done.
        boxes: what this rank holds. The writers' boxes together must tile every logical tensor exactly once.
        state: JSON values that are no tensors. The first writer's is written; another writer hands in the same, or {}.
        rank: the caller.
        writers: the ranks that write, the same on every rank; the first one coordinates. Other ranks' calls do
            nothing.
        asynchronous: write in a background thread; else return when the checkpoint is published.
        keep: how many complete checkpoints to keep.
        timeout: seconds to wait for the other writers.

    Raises:
        CheckpointError: an earlier save failed; or (asynchronous=False) this one did: says what, where and what to try.
    """
    folder = Path(folder)
    order = tuple(dict.fromkeys(writers))
    saving = Saving(layout.final(folder, step))
    if step < 0 or keep < 1 or not order:
        raise CheckpointError(
            f"save: expected step ≥ 0, keep ≥ 1 and a writer; found step {step}, keep {keep}, writers {order}"
        )
    if rank not in order:
        return saving
    key = (folder.absolute(), rank)
    previous = _running.pop(key, None)
    if previous is not None:
        previous._surface()
    job = Job(folder, step, part.snapshot(boxes), encode(state), rank, order, keep, timeout)
    _running[key] = saving
    saving._start(job)
    if not asynchronous:
        saving.wait()
    return saving


@atexit.register
def _warn_unfinished() -> None:
    """A save that still runs when the interpreter ends is lost: say so."""
    for (folder, rank), saving in _running.items():
        if not saving.done:
            _log.warning("rank %d left before %s in %s was written: it is not saved", rank, saving.path.name, folder)
