"""One writer's share of a checkpoint: its boxes in one safetensors file, and a JSON part that says what is in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fourfold.training.checkpoint import durable, layout, manifest
from fourfold.training.checkpoint.box import Box, span
from fourfold.training.checkpoint.errors import CheckpointError, free_bytes, no_space
from fourfold.training.checkpoint.safetensors_file import header

_HEADER_BYTES = 1024
"""Allowance for one box's lines in the header and the manifest, when free space is checked."""


@dataclass(frozen=True)
class Part:
    """What one writer wrote, as the coordinator reads it.

    Attributes:
        rank: the writer.
        save: name of the save that it belongs to.
        file: the data file's size and header hash.
        tensors: logical tensors with this writer's chunks only.
        state: a hash of every top-level entry of the run's state, so that ranks that disagree are found.
    """

    rank: int
    save: str
    file: manifest.DataFile
    tensors: dict[str, manifest.Entry]
    state: dict[str, str]


def snapshot(boxes: Sequence[Box]) -> list[Box]:
    """The boxes with values copied to host memory: what the caller does to its tensors from now on is not saved."""
    return [Box(b.name, b.shape, b.offsets, b.tensor.detach().to("cpu", copy=True).contiguous()) for b in boxes]


def needed_bytes(boxes: list[Box]) -> int:
    """Bytes that writing these boxes takes, headers generously included."""
    return sum(box.nbytes + _HEADER_BYTES for box in boxes) + 16 * _HEADER_BYTES


def write(folder: Path, rank: int, save: str, boxes: list[Box], state: dict[str, str]) -> None:
    """Write `boxes` (on the host, contiguous) and the part that describes them; both are on the disk on return."""
    need, free = needed_bytes(boxes), free_bytes(folder)
    if need > free:
        raise no_space(folder, need, free, "checked before writing")
    path = folder / layout.data_name(rank)
    tensors, entries = _lay_out(boxes, path.name)
    save_file(tensors, path)
    path.chmod((folder / layout.BEGIN).stat().st_mode & 0o777)  # safetensors makes its files private
    durable.flush_file(path)
    document = {
        "rank": rank,
        "save": save,
        "file": {"bytes": path.stat().st_size, "header_sha256": header(path).sha256},
        "tensors": manifest.tensors_to_json(entries),
        "state": state,
    }
    durable.write(folder / layout.part_name(rank), json.dumps(document).encode())
    durable.flush_folder(folder)


def read(folder: Path, rank: int) -> Part | None:
    """The part of `rank`, or None as long as it is not there."""
    try:
        document: dict[str, Any] = json.loads((folder / layout.part_name(rank)).read_bytes())
    except FileNotFoundError:
        return None
    file = manifest.DataFile(document["file"]["bytes"], document["file"]["header_sha256"])
    tensors = manifest.tensors_from_json(document["tensors"])
    return Part(document["rank"], document["save"], file, tensors, document["state"])


def _lay_out(boxes: list[Box], file: str) -> tuple[dict[str, torch.Tensor], dict[str, manifest.Entry]]:
    """Tensors by their key in the file, and the logical tensors they are boxes of (an empty box only names its own)."""
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, manifest.Entry] = {}
    for box in boxes:
        entry = entries.setdefault(box.name, manifest.Entry(box.shape, box.dtype, ()))
        if (entry.shape, entry.dtype) != (box.shape, box.dtype):
            raise CheckpointError(
                f"tensor {box.name!r}: one box has shape {entry.shape} of {entry.dtype}, "
                f"another {box.shape} of {box.dtype}; the boxes of a tensor share both"
            )
        if not box.tensor.numel():
            continue
        key = box.name + span(box.offsets, box.sizes)
        if key in tensors:
            raise CheckpointError(f"tensor {box.name!r}: the box {span(box.offsets, box.sizes)} was handed in twice")
        tensors[key] = box.tensor
        chunk = manifest.Chunk(file, key, box.offsets, box.sizes, hash_of(box.tensor))
        entries[box.name] = manifest.Entry(entry.shape, entry.dtype, (*entry.chunks, chunk))
    return tensors, entries


def hash_of(tensor: torch.Tensor) -> str:
    """SHA-256 of a contiguous host tensor's bytes, row-major."""
    return hashlib.sha256(memoryview(tensor.reshape(-1).view(torch.uint8).numpy())).hexdigest()  # pyright: ignore[reportArgumentType]
