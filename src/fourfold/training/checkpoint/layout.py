"""Names inside a folder of checkpoints.

CHECKPOINTS/step-00000042/            complete: manifest.json, manifest.sha256, rank-00000.safetensors, …
CHECKPOINTS/step-00000042.part/       being written, or left behind by a run that died; never read
CHECKPOINTS/step-00000042.replaced/   complete; moved aside while the same step is published again
"""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = "manifest.json"
SEAL = "manifest.sha256"
"""Holds the manifest's SHA-256 in the format that `sha256sum --check` reads."""
BEGIN = "begin.json"
FAILED = "failed.json"

_COMPLETE = re.compile(r"step-(\d{8,})(\.replaced)?")
_DATA = re.compile(r"rank-\d{5,}\.safetensors")


def final(folder: Path, step: int) -> Path:
    """Where the complete checkpoint of `step` lies."""
    return folder / f"step-{step:08d}"


def aside(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written until it is complete."""
    return folder / f"step-{step:08d}.part"


def replaced(folder: Path, step: int) -> Path:
    """Where an earlier complete checkpoint of the same step waits while its successor takes its place."""
    return folder / f"step-{step:08d}.replaced"


def data_name(rank: int) -> str:
    """File of one writer's tensors."""
    return f"rank-{rank:05d}.safetensors"


def part_name(rank: int) -> str:
    """File in which one writer says what it wrote."""
    return f"rank-{rank:05d}.json"


def failure_name(rank: int) -> str:
    """File in which one writer says why it could not write."""
    return f"rank-{rank:05d}.failed"


def is_data_name(name: str) -> bool:
    """Whether a manifest may name this file: a plain name in the checkpoint's own folder."""
    return _DATA.fullmatch(name) is not None


def complete(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every published checkpoint, newest step first; a replaced one after its successor."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name)) and path.is_dir()]
    ordered = sorted(found, key=lambda item: (-int(item[0][1]), item[0][2] is not None))
    return [(int(match[1]), path) for match, path in ordered]


def leftovers(folder: Path) -> list[Path]:
    """Folders of saves that never completed."""
    return sorted(path for path in folder.glob("step-*.part*") if path.is_dir())
