"""Whether a checkpoint on disk is what was saved."""

from __future__ import annotations

import shlex
from pathlib import Path

from fourfold.training.checkpoint import layout, manifest
from fourfold.training.checkpoint.errors import CheckpointError, Corrupted
from fourfold.training.checkpoint.safetensors_file import Header, hash_span, header


def check(path: Path) -> manifest.Manifest:
    """The cheap check: the manifest is there with the right hash, and every file has the right size.

    Raises:
        CheckpointError: it is no complete checkpoint; Corrupted names the file.
    """
    found = manifest.read(path)
    for name, file in found.files.items():
        check_size(path / name, file)
    return found


def check_all(path: Path) -> None:
    """The full check: also every header and every tensor's bytes.

    Raises:
        CheckpointError: as `check`; Corrupted names the file and the tensor.
    """
    found = check(path)
    headers = {name: check_header(path / name, file) for name, file in found.files.items()}
    for name, entry in found.tensors.items():
        for chunk in entry.chunks:
            check_chunk(path, name, chunk, headers[chunk.file])


def latest(folder: Path) -> Path | None:
    """The newest checkpoint below `folder`, by step, which passes the cheap check; None if there is none.

    What a writer that died left behind does not bear the name of a checkpoint. One that bears it and is damaged is not
    passed over: a run would go back without anybody's knowing.

    Raises:
        Corrupted: the newest is damaged; names the newest whole one, and the command that lets a run resume from it.
    """
    folder = Path(folder)
    while (path := _newest(folder)) is not None:
        try:
            check(path)
        except CheckpointError as error:
            if _newest(folder) == path:
                raise Corrupted(f"{error}; {remedy(path)}") from error
        else:
            return path
    return None


def _newest(folder: Path) -> Path | None:
    return next((path for _, path in layout.complete(folder)), None)


def is_whole(path: Path) -> bool:
    """Whether the cheap check passes."""
    try:
        check(path)
    except CheckpointError:
        return False
    return True


def good_one_before(path: Path) -> Path | None:
    """The newest other checkpoint beside `path` that passes the full check."""
    for _, other in layout.complete(path.parent):
        if other == path:
            continue
        try:
            check_all(other)
        except (CheckpointError, OSError):
            continue
        return other
    return None


def remedy(path: Path) -> str:
    """What to do about the damaged checkpoint at `path`."""
    other = good_one_before(path)
    away = f"move this one away: `{shlex.join(['mv', str(path), str(path.with_name(f'damaged-{path.name}'))])}`"
    if other is None:
        return f"no other checkpoint beside it is whole; to begin again, {away}"
    return f"{other} is whole: load that one; to resume from it, {away}"


def check_size(path: Path, file: manifest.DataFile) -> None:
    """The file is there and as long as it was."""
    size = path.stat().st_size if path.is_file() else None
    if size != file.bytes:
        found = "no file" if size is None else f"{size:,} bytes"
        raise Corrupted(f"{path}: expected {file.bytes:,} bytes, found {found}")


def check_header(path: Path, file: manifest.DataFile) -> Header:
    """The file's header, which is the one that was written."""
    check_size(path, file)
    try:
        found = header(path)
    except ValueError as error:
        raise Corrupted(f"{path}: expected a header with the hash {file.header_sha256}, found none: {error}") from error
    if found.sha256 != file.header_sha256:
        raise Corrupted(f"{path}: expected a header with the hash {file.header_sha256}, found {found.sha256}")
    return found


def check_chunk(path: Path, name: str, chunk: manifest.Chunk, head: Header) -> None:
    """The bytes of one box of tensor `name` are those that were written."""
    if chunk.key not in head.spans:
        raise Corrupted(f"{path / chunk.file}: tensor {name!r}: expected the entry {chunk.key!r}, found none")
    found = hash_span(path / chunk.file, *head.spans[chunk.key])
    if found != chunk.sha256:
        raise Corrupted(
            f"{path / chunk.file}: tensor {name!r}, box {chunk.key.removeprefix(name)}: "
            f"expected the hash {chunk.sha256}, found {found}"
        )
