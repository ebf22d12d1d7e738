"""What a checkpoint says about itself: every tensor as boxes in files, with hashes, and the run's state. Plain JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fourfold.training.checkpoint import layout
from fourfold.training.checkpoint.box import DTYPES, span
from fourfold.training.checkpoint.errors import CheckpointError, Corrupted

FORMAT = "fourfold-checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Chunk:
    """One box of a logical tensor, as it lies in a file.

    Attributes:
        file: name of the safetensors file inside the checkpoint.
        key: name of the tensor inside that file.
        offsets, sizes: the box, per dim of the logical shape.
        sha256: of the box's bytes, row-major.
    """

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sha256: str

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.sizes)

    def __str__(self) -> str:
        return f"{span(self.offsets, self.sizes)} in {self.file}"


@dataclass(frozen=True)
class Entry:
    """A logical tensor: its shape, the name of its dtype, and the chunks that tile it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class DataFile:
    """A safetensors file: its size in bytes and the SHA-256 of its header (the chunks' hashes cover the rest)."""

    bytes: int
    header_sha256: str


@dataclass(frozen=True)
class Manifest:
    """The whole of a checkpoint's description.

    Attributes:
        step: optimizer steps done.
        save: a random name of this save; tells it from an earlier attempt at the same step.
        files: by file name.
        tensors: by logical name.
        state: everything that is no tensor (JSON values).
    """

    step: int
    save: str
    files: dict[str, DataFile]
    tensors: dict[str, Entry]
    state: dict[str, Any]

    def to_bytes(self) -> bytes:
        """The JSON document."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "save": self.save,
            "state": self.state,
            "files": {name: vars(file) for name, file in self.files.items()},
            "tensors": tensors_to_json(self.tensors),
        }
        return json.dumps(document).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: Path) -> Manifest:
        """Parse and check; `where` is named in errors.

        Raises:
            CheckpointError: not a manifest of this format and version.
        """
        try:
            document = json.loads(data)
            if document["format"] != FORMAT or document["version"] != VERSION:
                raise CheckpointError(
                    f"{where}: expected a {FORMAT} of version {VERSION}, "
                    f"found {document['format']!r} of version {document['version']!r}; "
                    f"read it with the fourfold that wrote it"
                )
            files = {
                str(name): DataFile(int(f["bytes"]), str(f["header_sha256"])) for name, f in document["files"].items()
            }
            tensors = tensors_from_json(document["tensors"])
            manifest = cls(int(document["step"]), str(document["save"]), files, tensors, dict(document["state"]))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise Corrupted(f"{where}: not a checkpoint manifest ({error!r}); choose another checkpoint") from error
        manifest._check_names(where)
        return manifest

    def _check_names(self, where: Path) -> None:
        for name in self.files:
            if not layout.is_data_name(name):
                raise Corrupted(f"{where}: names the file {name!r}, which is no data file of a checkpoint")
        for name, entry in self.tensors.items():
            if entry.dtype not in DTYPES:
                raise Corrupted(f"{where}: tensor {name!r} has the unknown dtype {entry.dtype!r}")
            for chunk in entry.chunks:
                if chunk.file not in self.files:
                    raise Corrupted(
                        f"{where}: tensor {name!r} lies in {chunk.file!r}, which the manifest does not list"
                    )


def tensors_to_json(tensors: dict[str, Entry]) -> dict[str, Any]:
    """Logical tensors as JSON values; shared by manifests and writers' parts."""
    return {
        name: {"shape": entry.shape, "dtype": entry.dtype, "chunks": [vars(chunk) for chunk in entry.chunks]}
        for name, entry in tensors.items()
    }


def tensors_from_json(document: dict[str, Any]) -> dict[str, Entry]:
    """The inverse of `tensors_to_json`."""
    return {
        str(name): Entry(
            tuple(map(int, entry["shape"])),
            str(entry["dtype"]),
            tuple(
                Chunk(
                    str(chunk["file"]),
                    str(chunk["key"]),
                    tuple(map(int, chunk["offsets"])),
                    tuple(map(int, chunk["sizes"])),
                    str(chunk["sha256"]),
                )
                for chunk in entry["chunks"]
            ),
        )
        for name, entry in document.items()
    }


def seal(data: bytes) -> bytes:
    """The contents of the seal file for a manifest's bytes."""
    return f"{hashlib.sha256(data).hexdigest()}  {layout.MANIFEST}\n".encode()


def read(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, its own hash verified.

    Raises:
        CheckpointError: there is none. Corrupted: it is not what was written.
    """
    try:
        data = (path / layout.MANIFEST).read_bytes()
        sealed = (path / layout.SEAL).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {error.strerror or error} ({Path(error.filename or '').name}); "
            f"name a folder step-… that holds {layout.MANIFEST}"
        ) from error
    if seal(data) != sealed:
        raise Corrupted(
            f"{path / layout.MANIFEST}: expected the hash {sealed.decode(errors='replace').split(' ')[0]}, "
            f"found {hashlib.sha256(data).hexdigest()}"
        )
    return Manifest.from_bytes(data, path / layout.MANIFEST)


def merge(parts: Iterable[tuple[int, dict[str, Entry]]]) -> dict[str, Entry]:
    """The union of what every writer wrote: (rank, its tensors) in, logical tensors out.

    Raises:
        CheckpointError: two writers disagree on a tensor's shape or dtype, or the boxes do not tile it exactly once.
    """
    first: dict[str, tuple[int, Entry]] = {}
    chunks: dict[str, list[Chunk]] = {}
    for rank, tensors in parts:
        for name, entry in tensors.items():
            said, known = first.setdefault(name, (rank, entry))
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                raise CheckpointError(
                    f"tensor {name!r}: rank {said} saves shape {known.shape} of {known.dtype}, "
                    f"rank {rank} shape {entry.shape} of {entry.dtype}; both must be the same on every rank"
                )
            chunks.setdefault(name, []).extend(entry.chunks)
    merged = {name: Entry(e.shape, e.dtype, tuple(chunks[name])) for name, (_, e) in first.items()}
    for name, entry in merged.items():
        check_tiling(name, entry)
    return merged


def check_tiling(name: str, entry: Entry) -> None:
    """Every element of the logical tensor lies in exactly one chunk.

    Boxes inside the shape that do not overlap and whose volumes add up to the whole leave no gap.
    """
    chunks = [chunk for chunk in entry.chunks if chunk.numel]
    clash = _overlap(chunks)
    if clash:
        raise CheckpointError(
            f"tensor {name!r}: boxes {clash[0]} and {clash[1]} overlap; "
            f"every element must be saved by exactly one writer"
        )
    covered, whole = sum(chunk.numel for chunk in chunks), prod(entry.shape)
    if covered != whole:
        held = ", ".join(map(str, chunks[:8])) + (", …" if len(chunks) > 8 else "") or "none"
        raise CheckpointError(
            f"tensor {name!r}: expected boxes that cover all {whole} elements of {entry.shape}, "
            f"found {covered} covered by {held}; "
            f"a rank that holds a part is missing from `writers`, or hands in too few boxes"
        )


def _overlap(chunks: list[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks that share an element, found by sweeping along dim 0."""
    if chunks and not chunks[0].sizes:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
    active: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: c.offsets[0]):
        active = [other for other in active if other.offsets[0] + other.sizes[0] > chunk.offsets[0]]
        for other in active:
            pairs = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            if all(a < b + bs and b < a + size for a, size, b, bs in pairs):
                return other, chunk
        active.append(chunk)
    return None
