"""Loading: any rank fills any boxes from the boxes that were saved, reading only what overlaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fourfold.torch_private import Overlap, overlaps
from fourfold.training.checkpoint import manifest
from fourfold.training.checkpoint.box import Box, span
from fourfold.training.checkpoint.errors import CheckpointError, Corrupted
from fourfold.training.checkpoint.verification import check, check_chunk, check_header, remedy

_SHOWN = 8
"""Names listed in one error."""


def load(
    path: Path,
    boxes: Sequence[Box],
    *,
    strict: bool = True,
    allow_cast: bool = False,
    expected: Collection[str] | None = None,
) -> dict[str, Any]:
    """Fill `boxes` in place from the checkpoint at `path`, however it was cut, and return the run's state.

    What is read is verified: every byte of a saved box from which values are taken, and the headers and manifest.

    Args:
        path: a folder `step-…`, as `latest` gives it.
        boxes: what this rank wants; views of its arenas. None is written to unless all names, shapes and dtypes fit.
        strict: refuse tensors of the checkpoint that nobody asks for. One that is asked for and not there is always an
            error.
        allow_cast: convert where a dtype differs; else that is an error.
        expected: the names that all ranks together ask for, where this one asks for fewer (default: the boxes' names).

    Raises:
        CheckpointError: no checkpoint, or one that does not fit; names the tensors and the nearest names.
        Corrupted: names file and tensor, expected and found hash, and the newest older checkpoint that is whole.
    """
    path = Path(path)
    try:
        found = check(path)
        fit(path, found, boxes, strict=strict, allow_cast=allow_cast, expected=expected)
        _fill(path, found, boxes)
    except Corrupted as error:
        raise Corrupted(f"{error}; {remedy(path)}") from error
    return found.state


def fit(
    path: Path,
    found: manifest.Manifest,
    boxes: Sequence[Box],
    *,
    strict: bool,
    allow_cast: bool,
    expected: Collection[str] | None,
) -> None:
    """Compare what is asked for with what is there; one error lists every difference."""
    problems: list[str] = []
    asked = {box.name: box for box in boxes}
    for name, box in asked.items():
        entry = found.tensors.get(name)
        if entry is None:
            near = get_close_matches(name, found.tensors, n=1)
            problems.append(f"missing: {name!r}" + (f" (nearest: {near[0]!r})" if near else ""))
        elif entry.shape != box.shape:
            problems.append(f"shape of {name!r}: expected {box.shape}, found {entry.shape}")
        elif entry.dtype != box.dtype and not allow_cast:
            problems.append(f"dtype of {name!r}: expected {box.dtype}, found {entry.dtype} (allow_cast=True converts)")
    if strict:
        names = set(asked) | set(expected or ())
        for name in found.tensors.keys() - names:
            near = get_close_matches(name, names, n=1)
            problems.append(f"unexpected: {name!r}" + (f" (nearest: {near[0]!r})" if near else ""))
    if problems:
        more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"checkpoint {path} does not fit the run:\n  " + "\n  ".join(sorted(problems)[:_SHOWN]) + more +
            "\nload it with the model and optimizer that it was saved with (or strict=False, to leave the unexpected)"
        )  # fmt: skip


def read_whole(path: Path, found: manifest.Manifest, name: str) -> torch.Tensor:
    """One full logical tensor on the host, verified."""
    entry = found.tensors[name]
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    _fill(path, found, [Box.whole(name, tensor)])
    return tensor


def _fill(path: Path, found: manifest.Manifest, boxes: Iterable[Box]) -> None:
    """Copy every overlap of a saved with a wanted box, file by file, so that each file is opened once."""
    by_name: dict[str, list[Box]] = defaultdict(list)
    for box in boxes:
        if box.tensor.numel():
            by_name[box.name].append(box)
    work: dict[str, list[tuple[str, manifest.Chunk, Box, Overlap]]] = defaultdict(list)
    for name, wanted in by_name.items():
        chunks = found.tensors[name].chunks
        filled = [0] * len(wanted)
        for overlap in overlaps(name, [(c.offsets, c.sizes) for c in chunks], [(b.offsets, b.sizes) for b in wanted]):
            chunk, box = chunks[overlap.saved], wanted[overlap.wanted]
            work[chunk.file].append((name, chunk, box, overlap))
            filled[overlap.wanted] += overlap.numel
        for box, count in zip(wanted, filled, strict=True):
            if count != box.tensor.numel():
                raise Corrupted(
                    f"{path}: tensor {name!r}: expected all of {span(box.offsets, box.sizes)}, "
                    f"found {count} of {box.tensor.numel()} elements"
                )
    for file, items in work.items():
        _fill_from(path, found, file, items)


def _fill_from(
    path: Path, found: manifest.Manifest, file: str, items: list[tuple[str, manifest.Chunk, Box, Overlap]]
) -> None:
    """Verify the touched boxes of one file, then copy slices of them."""
    head = check_header(path / file, found.files[file])
    for name, chunk in {chunk.key: (name, chunk) for name, chunk, _, _ in items}.values():
        check_chunk(path, name, chunk, head)
    with safe_open(path / file, framework="pt") as data, torch.no_grad():
        for _, chunk, box, overlap in items:
            target = box.tensor.detach()
            if not overlap.lengths:
                target.copy_(data.get_tensor(chunk.key))
                continue
            source = data.get_slice(chunk.key)[_index(overlap.saved_offsets, overlap.lengths)]
            target[_index(overlap.wanted_offsets, overlap.lengths)].copy_(source)


def _index(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
