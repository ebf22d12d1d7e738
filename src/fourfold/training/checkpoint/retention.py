"""Which checkpoints stay, and what dead runs leave behind."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from fourfold.training.checkpoint import layout
from fourfold.training.checkpoint.verification import is_whole


def clear_leftovers(folder: Path) -> None:
    """Remove the folders of saves that never completed, and checkpoints whose successor of the same step is in place.

    They are renamed first, so that a writer that took one for a live save loses it at once.
    """
    for path in layout.leftovers(folder):
        _remove(path)
    for step, path in layout.complete(folder):
        if path == layout.replaced(folder, step) and is_whole(layout.final(folder, step)):
            _remove(path)


def prune(folder: Path, newest: Path, keep: int) -> None:
    """Keep the `keep` newest whole checkpoints, `newest` (just published) among them; remove what is older than those.

    Nothing is removed unless `newest` passes the check. A damaged checkpoint does not count, and goes with its elders.
    """
    if not is_whole(newest):
        return
    found = layout.complete(folder)
    whole = [path for _, path in found if path != newest and is_whole(path)]
    kept = {newest, *whole[: keep - 1]}
    oldest = min(step for step, path in found if path in kept)
    for step, path in found:
        if path not in kept and (path in whole or step < oldest):
            _remove(path)


def _remove(path: Path) -> None:
    """Rename to a name that is never read, then delete: an interruption leaves no half checkpoint."""
    dead = path.with_name(f"{path.name.split('.')[0]}.part-{uuid.uuid4().hex}")
    path.rename(dead)
    shutil.rmtree(dead, ignore_errors=True)
