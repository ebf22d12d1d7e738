"""The folder of checkpoints, before training relies on it."""

from __future__ import annotations

import uuid
from pathlib import Path

from fourfold.training.checkpoint import durable
from fourfold.training.checkpoint.errors import CheckpointError, free_bytes, in_words, no_space


def prepare(folder: Path, need: int = 0) -> None:
    """Make the folder of checkpoints, and prove that files can be written there. Call it before training starts.

    Args:
        need: bytes of one checkpoint, where they are known: refused at once if the disk has no room for them.

    Raises:
        CheckpointError: what is in the way, and what to try.
    """
    folder = Path(folder)
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        durable.write(probe, b"fourfold")
        probe.unlink()
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(
            f"checkpoint folder {folder}: expected a folder, found a file; name another folder"
        ) from error
    except OSError as error:
        raise in_words(error, folder, need) or error from error
    free = free_bytes(folder)
    if need > free:
        raise no_space(folder, need, free, "checked before writing")
