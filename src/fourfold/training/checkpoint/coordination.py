"""How the writers of one checkpoint come together: by files in the folder, so that it may run beside training.

The coordinator (the first writer) clears what dead runs left, makes `step-….part` and draws a name for this save. The
followers wait for the folder, write into it, and wait for the manifest that bears that name. Since a folder that a dead
run left behind may be there before the coordinator has cleared it, a follower that sees the name change starts again
with its snapshot: nothing of an earlier attempt is ever taken for a part of this one.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fourfold.training.checkpoint import durable, layout, manifest, part
from fourfold.training.checkpoint.box import Box
from fourfold.training.checkpoint.errors import CheckpointError, WriterLost, in_words
from fourfold.training.checkpoint.retention import clear_leftovers, prune
from fourfold.training.checkpoint.state import fingerprints

_log = logging.getLogger(__name__)

_POLL = 0.02
"""Seconds between two looks at the folder."""
_GRACE = 5.0
"""Seconds for which a follower waits beside a failed save for a new one, since the failure may be a dead run's."""


@dataclass(frozen=True)
class Job:
    """One writer's share of one save.

    Attributes:
        folder, step, rank, writers, keep, timeout: as `save` takes them.
        boxes: the snapshot.
        state: encoded.
    """

    folder: Path
    step: int
    boxes: list[Box]
    state: str
    rank: int
    writers: tuple[int, ...]
    keep: int
    timeout: float

    def run(self) -> None:
        """Write this rank's part and see the whole published.

        Raises:
            CheckpointError: says why it could not be.
        """
        try:
            (_coordinate if self.rank == self.writers[0] else _follow)(self)
        except CheckpointError:
            raise
        except Exception as error:
            raise self.in_words(error) from error

    def in_words(self, error: Exception) -> Exception:
        """The error as a person can use it."""
        return in_words(error, self.folder, part.needed_bytes(self.boxes)) or error

    @property
    def aside(self) -> Path:
        """Where the checkpoint is while it is written."""
        return layout.aside(self.folder, self.step)

    @property
    def final(self) -> Path:
        """Where it is once it is complete."""
        return layout.final(self.folder, self.step)


def _coordinate(job: Job) -> None:
    """The first writer: open the save, write its own part, gather the others', publish."""
    job.folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(job.folder)
    name = uuid.uuid4().hex
    job.aside.mkdir()
    durable.write(job.aside / layout.BEGIN, json.dumps({"save": name, "step": job.step}).encode())
    try:
        part.write(job.aside, job.rank, name, job.boxes, fingerprints(job.state))
        _publish(job, name, _gather(job, name))
    except Exception as error:
        _tell(job, job.aside / layout.FAILED, name, error)
        raise
    prune(job.folder, job.final, job.keep)


def _gather(job: Job, name: str) -> list[part.Part]:
    """Every writer's part of this save, in the order of the writers."""
    parts: dict[int, part.Part] = {}
    for _ in _ticks(job.timeout):
        for rank in job.writers:
            found = None if rank in parts else part.read(job.aside, rank)
            if found is not None and found.save == name:
                parts[rank] = found
            _raise_failure(job.aside / layout.failure_name(rank), name)
        if len(parts) == len(job.writers):
            return [parts[rank] for rank in job.writers]
    missing = ", ".join(str(rank) for rank in job.writers if rank not in parts)
    raise WriterLost(
        f"checkpoint of step {job.step} in {job.folder}: no part from rank {missing} within {job.timeout:g} s "
        f"({len(parts)} of {len(job.writers)} writers delivered); "
        f"see whether the rank still runs and reaches the same save, and whether it sees this folder"
    )


def _publish(job: Job, name: str, parts: list[part.Part]) -> None:
    """Check the whole, write the manifest last, and give the folder its final name."""
    for other in parts[1:]:
        differing = [key for key, value in other.state.items() if parts[0].state.get(key) != value]
        if differing:
            raise CheckpointError(
                f"checkpoint of step {job.step}: rank {other.rank} hands in another state than rank {parts[0].rank} "
                f"in {', '.join(differing)}; only one is written, so it must be the same, or {{}} "
                f"(what differs by rank is saved as tensors)"
            )
    tensors = manifest.merge((other.rank, other.tensors) for other in parts)
    files = {layout.data_name(other.rank): other.file for other in parts}
    document = manifest.Manifest(job.step, name, files, tensors, json.loads(job.state)).to_bytes()
    durable.write(job.aside / layout.SEAL, manifest.seal(document))
    durable.write(job.aside / layout.MANIFEST, document)
    for other in parts:
        (job.aside / layout.part_name(other.rank)).unlink()
    (job.aside / layout.BEGIN).unlink()
    durable.flush_folder(job.aside)
    old = layout.replaced(job.folder, job.step)
    if job.final.exists():
        shutil.rmtree(old, ignore_errors=True)
        job.final.rename(old)
    job.aside.rename(job.final)
    durable.flush_folder(job.folder)
    shutil.rmtree(old, ignore_errors=True)


def _follow(job: Job) -> None:
    """Another writer: write its part into the save that the coordinator opened, and see it published."""
    written: str | None = None
    since: float | None = None
    for _ in _ticks(job.timeout):
        name = _name_of(job.aside / layout.BEGIN)
        if name is not None and name != written:
            written, since = (name, None) if _contribute(job, name) else (None, None)
        elif written is None:
            continue
        elif (job.aside / layout.FAILED).exists():
            since = since or time.monotonic()
            if time.monotonic() - since > _GRACE:
                _raise_failure(job.aside / layout.FAILED, written)
        elif name is None and _published(job, written):
            return
    state = "opened no save" if written is None else "did not publish the save"
    raise WriterLost(
        f"checkpoint of step {job.step} in {job.folder}: rank {job.writers[0]}, which coordinates, {state} within "
        f"{job.timeout:g} s; see whether it still runs and reaches the same save, "
        f"and whether this rank ({job.rank}) sees its folder"
    )


def _contribute(job: Job, name: str) -> bool:
    """Write this follower's part; False if the folder vanished meanwhile (it was a dead run's)."""
    try:
        part.write(job.aside, job.rank, name, job.boxes, fingerprints(job.state))
    except Exception as error:
        if _name_of(job.aside / layout.BEGIN) != name:
            return False
        _tell(job, job.aside / layout.failure_name(job.rank), name, error)
        raise
    return True


def _published(job: Job, name: str) -> bool:
    """Whether the final folder holds the save of this name."""
    try:
        return manifest.read(job.final).save == name
    except CheckpointError:
        return False


def _name_of(begin: Path) -> str | None:
    """The name of the save that is open in a folder, if one is."""
    try:
        return str(json.loads(begin.read_bytes())["save"])
    except OSError:
        return None


def _tell(job: Job, path: Path, name: str, error: Exception) -> None:
    """Leave the reason of a failure for the other writers; where even that fails, they time out."""
    document = {"save": name, "rank": job.rank, "reason": str(job.in_words(error))}
    try:
        (job.aside / layout.data_name(job.rank)).unlink(missing_ok=True)  # makes room on a full disk
        durable.write(path, json.dumps(document).encode())
    except OSError as second:
        _log.warning("rank %d could not leave word of its failed save: %s", job.rank, second)


def _raise_failure(path: Path, name: str) -> None:
    """Raise what another writer left in `path` about the save of this name, if anything."""
    try:
        document = json.loads(path.read_bytes())
    except OSError:
        return
    if document["save"] == name:
        raise WriterLost(f"rank {document['rank']} could not save: {document['reason']}")


def _ticks(seconds: float) -> Iterator[None]:
    """Yield every `_POLL` seconds until `seconds` have passed; the last look is after the end."""
    stop = time.monotonic() + seconds
    while True:
        last = time.monotonic() >= stop
        yield
        if last:
            return
        time.sleep(_POLL)
