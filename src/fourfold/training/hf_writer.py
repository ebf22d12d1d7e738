"""Writing the weights of a Hugging Face folder: safetensors files of bounded size, an index, and a check of both."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fourfold.training.checkpoint.durable import flush_file
from fourfold.training.checkpoint.part import hash_of
from fourfold.training.checkpoint.safetensors_file import hash_span, header

FILE_BYTES = 2 << 30
"""A file is closed before it would grow beyond this; transformers shards its own files in the same way."""


class HfWriter:
    """Takes tensors one by one. Holds at most one file's worth of them."""

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        """Write into `folder`, which exists."""
        self.folder, self.file_bytes = folder, file_bytes
        self.bytes = 0
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._files: list[list[str]] = []
        self._hashes: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor under its final name."""
        tensor = tensor.detach().cpu().contiguous()
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self.file_bytes:
            self._flush()
        self._held[name] = tensor
        self._held_bytes += size
        self.bytes += size
        self._hashes[name] = hash_of(tensor)

    def finish(self) -> list[str]:
        """Write what is left and the index; the names of the files."""
        self._flush()
        count = len(self._files)
        if count == 1:
            names = ["model.safetensors"]
        else:
            names = [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
        for index, name in enumerate(names):
            self._draft(index).rename(self.folder / name)
        if count > 1:
            places = {key: name for name, keys in zip(names, self._files, strict=True) for key in keys}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": places}
            path = self.folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=1), encoding="utf-8")
            flush_file(path)
        return names

    def differences(self, expected: dict[str, tuple[int, ...]]) -> list[str]:
        """Compare the files on disk with the expected names and shapes, and with the hashes of what was added."""
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for path in self.folder.glob("*.safetensors"):
            spans = header(path).spans
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    found[name] = tuple(file.get_slice(name).get_shape()), hash_span(path, *spans[name])
        problems = [f"missing {name!r}" for name in expected.keys() - found.keys()]
        problems += [f"unexpected {name!r}" for name in found.keys() - expected.keys()]
        for name in expected.keys() & found.keys():
            shape, digest = found[name]
            if shape != expected[name]:
                problems.append(f"shape of {name!r}: expected {expected[name]}, found {shape}")
            if digest != self._hashes.get(name):
                problems.append(f"hash of {name!r}: expected {self._hashes.get(name)}, found {digest}")
        return sorted(problems)

    def _flush(self) -> None:
        path = self._draft(len(self._files))
        # transformers refuses files that do not say for which framework they were written
        save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(self.folder.stat().st_mode & 0o666)
        flush_file(path)
        self._files.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def _draft(self, index: int) -> Path:
        return self.folder / f"draft-{index}.safetensors"
