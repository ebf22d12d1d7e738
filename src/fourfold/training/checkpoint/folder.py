"""The folder of checkpoints, before training relies on it."""

from __future__ import annotations

import uuid
from pathlib import Path

from fourfold.training.checkpoint import durable
from fourfold.training.checkpoint.errors import CheckpointError, in_words


def prepare(folder: Path) -> None:
    """Make the folder of checkpoints, and prove that files can be written there. Call it before training starts.

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
        raise in_words(error, folder, len(b"fourfold")) or error from error
