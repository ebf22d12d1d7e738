"""The weights in a checkpoint, box by box, however it was cut: for another run to begin with, or to be written anew."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fourfold.training.checkpoint import CheckpointError
from fourfold.training.checkpoint.verification import check, check_chunk, check_header
from fourfold.training.unread import Brick, Source, Unread


class CheckpointSource(Source):
    """Weights and buffers of a checkpoint by their names in the model; `parallelize(weights=…)` takes it.

    A weight's bytes are compared with their hashes when it is first asked for; what is read then is what is asked for.
    """

    def __init__(self, path: Path) -> None:
        """Read the manifest.

        Args:
            path: a folder `step-…`, as `checkpoint.latest` gives it.

        Raises:
            CheckpointError: no whole checkpoint.
        """
        self.path, self.manifest = Path(path), check(Path(path))
        self._headers: dict[str, Any] = {}
        self._opened: dict[str, Any] = {}
        self._found: dict[str, Unread] = {}

    def unread(self, name: str) -> Unread:
        """The tensor as it lies in the files.

        Raises:
            CheckpointError: there is none of this name; names the nearest. Corrupted: its bytes are not those written.
        """
        if name not in self._found:
            full = f"model.{name}" if f"model.{name}" in self.manifest.tensors else f"buffer.{name}"
            entry = self.manifest.tensors.get(full)
            if entry is None:
                near = get_close_matches(f"model.{name}", self.manifest.tensors, n=1)
                raise CheckpointError(
                    f"{self.path}: expected a weight {name!r}, found none"
                    + (f" (nearest: {near[0]!r})" if near else "")
                    + "; it is a checkpoint of another model"
                )
            bricks = []
            for chunk in entry.chunks:
                file = self._open(chunk.file)
                check_chunk(self.path, full, chunk, self._headers[chunk.file])
                view = file.get_slice(chunk.key)[...] if chunk.sizes else file.get_tensor(chunk.key)
                bricks.append(Brick(chunk.offsets, view))
            self._found[name] = Unread(entry.shape, bricks)
        return self._found[name]

    def dtype(self, name: str) -> torch.dtype:
        """In which a tensor was saved."""
        return self.unread(name).bricks[0].view.dtype

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._headers[file] = check_header(self.path / file, self.manifest.files[file])
            self._opened[file] = safe_open(self.path / file, framework="pt")
        return self._opened[file]
