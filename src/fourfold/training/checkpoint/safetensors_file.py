"""The bytes of a safetensors file: eight bytes of header length, a JSON header, then every tensor's data, no gaps.

Reading values is the library's; here is what hashing needs: the header as it lies on disk, and where each tensor's
bytes are.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

_BLOCK = 1 << 22
_HEADER_LIMIT = 100_000_000
"""The library refuses longer headers too."""


class Header(NamedTuple):
    """SHA-256 of the length and the JSON, and every tensor's first and last byte (exclusive) in the file."""

    sha256: str
    spans: dict[str, tuple[int, int]]


def header(path: Path) -> Header:
    """Read the header of the file.

    Raises:
        ValueError: the file is too short, or its header is no JSON.
    """
    with path.open("rb") as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        if len(length) < 8 or size > _HEADER_LIMIT:
            raise ValueError(f"{path}: not a safetensors file")
        text = file.read(size)
    if len(text) < size:
        raise ValueError(f"{path}: the file ends inside its header")
    start = 8 + size
    try:
        document = json.loads(text)
        spans = {
            name: (start + int(tensor["data_offsets"][0]), start + int(tensor["data_offsets"][1]))
            for name, tensor in document.items()
            if name != "__metadata__"
        }
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{path}: the header describes no tensors ({error!r})") from error
    return Header(hashlib.sha256(length + text).hexdigest(), spans)


def hash_span(path: Path, start: int, stop: int) -> str:
    """SHA-256 of the file's bytes [start, stop), read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        left = stop - start
        while left > 0 and (block := file.read(min(_BLOCK, left))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()
