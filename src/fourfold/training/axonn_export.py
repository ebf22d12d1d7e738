"""Export in AxoNN's layout: a run's newest checkpoint as one safetensors file a tensor rank, of any grid."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fourfold.placement.cut import Block
from fourfold.training import subject
from fourfold.training.axonn_files import AxonnGrid, AxonnLayout, AxonnSource, write
from fourfold.training.checkpoint import durable, latest
from fourfold.training.checkpoint.errors import free_bytes
from fourfold.training.checkpoint_source import CheckpointSource
from fourfold.training.export import ExportError
from fourfold.training.folder import RunFolder


@dataclass(frozen=True)
class AxonnExport:
    """What was written. There is a result only if all of it was read back and is what the checkpoint holds.

    Attributes:
        folder: holds the ranks' folders, and for a model of transformers its config.json.
        checkpoint: what was exported.
        step: optimizer steps that it has seen.
        grid: AxoNN's row, col and depth.
        tensors: in every file.
        parallel: linear layers' tensors that are cut; all others lie whole in every file.
        bytes: of all files.
    """

    folder: Path
    checkpoint: Path
    step: int
    grid: AxonnGrid
    tensors: int
    parallel: int
    bytes: int
    ok: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"folder": str(self.folder), "checkpoint": str(self.checkpoint)}

    def text(self) -> str:
        """A few lines."""
        files = self.grid.row * self.grid.col * self.grid.depth
        return (
            f"exported step {self.step} ({self.checkpoint}) to {self.folder} in AxoNN's layout\n"
            f"{files} file(s), row {self.grid.row}, col {self.grid.col}, depth {self.grid.depth}, "
            f"{self.tensors} tensors each, {self.parallel} of them cut, {self.bytes:,} bytes: read back and equal"
        )


def export(run: str | Path, target: str | Path, grid: AxonnGrid) -> AxonnExport:
    """Write the newest whole checkpoint of a run as per-rank files; at most one rank's file is held at a time.

    Everything is written aside, read back and compared, then renamed.

    Args:
        run: a run folder (config.yaml, checkpoints/).
        target: where to write; must not exist, or be empty.
        grid: of the files, whatever the run's own was.

    Raises:
        ExportError: no checkpoint, a grid of no ranks, a target that is in use, no room.
        CheckpointError: the checkpoint is damaged.
    """
    folder, target = RunFolder(Path(run)), Path(target)
    if min(grid) < 1:
        raise ExportError(f"--axonn: expected sizes of row, col and depth of at least 1, found {tuple(grid)}")
    newest = latest(folder.checkpoints)
    if newest is None:
        raise ExportError(f"{folder.checkpoints}: expected a whole checkpoint, found none; train the run first")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"{target}: expected an empty folder or none, found something; name another folder")
    with torch.device("meta"):
        model = subject.builder(folder.read_config())()
    source = CheckpointSource(newest)
    aside = target.parent / f".{target.name}.part-{uuid.uuid4().hex}"
    try:
        aside.mkdir(parents=True)
        files = write(aside, source, model, grid, dtype=source.dtype)
        size = sum(path.stat().st_size for path in files)
        settings: Any = getattr(model, "config", None)
        if hasattr(settings, "save_pretrained"):
            settings.save_pretrained(aside)
        _compare(aside, source, model)
        durable.flush_folder(aside)
        aside.rename(target)
        durable.flush_folder(target.parent)
    except OSError as error:
        raise ExportError(
            f"{target} cannot be written ({error}): {free_bytes(target):,} bytes are free; free some space or name "
            "another folder"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    layout = AxonnLayout.of(model, grid)
    return AxonnExport(target, newest, source.manifest.step, grid, len(layout.shapes), len(layout.cuts), size)


def _compare(folder: Path, source: CheckpointSource, model: nn.Module) -> None:
    """Read every weight back, a chunk of both at a time."""
    found = AxonnSource(folder, model)
    for name, weight in model.named_parameters():
        mine = torch.empty(weight.shape, dtype=source.dtype(name)).view(-1)
        theirs = torch.empty_like(mine)
        Block.whole(weight.shape).read(source, name, 0, mine, mine.dtype)
        Block.whole(weight.shape).read(found, name, 0, theirs, mine.dtype)
        if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            raise ExportError(f"{folder}: what was read back of {name!r} is not what was meant")
