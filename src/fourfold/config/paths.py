"""Paths that a config names are looked at before anything starts."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fourfold.config.problem import nearest

HIDDEN = "a pattern also skips names that begin with a dot"


def missing(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the merged settings name and this machine does not have; of the wrong type is the schema's to say."""
    model, data, run = (_section(settings, name) for name in ("model", "data", "run"))
    if isinstance(model.get("path"), str) and model["path"]:
        yield from (("model.path", text) for text in _model(Path(model["path"]).expanduser()))
    files = data.get("files")
    for index, pattern in enumerate(files if isinstance(files, (list, tuple)) else ()):
        if isinstance(pattern, str) and pattern:
            yield from ((f"data.files.{index}", text) for text in _pattern(pattern))
    for key, folder in (("data.cache", data.get("cache")), ("run.folder", run.get("folder"))):
        if isinstance(folder, str) and Path(folder).expanduser().is_file():
            yield key, f"expected a folder, found the file {folder!r}; choose another name"
    hardware = settings.get("hardware")
    if isinstance(hardware, str) and Path(hardware).suffix.lower() in (".yaml", ".yml", ".json"):
        if not Path(hardware).expanduser().is_file():
            yield (
                "hardware",
                f"expected a cluster file, found no file {hardware!r}{_neighbour(Path(hardware))}; check it",
            )


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = settings.get(name)
    return section if isinstance(section, Mapping) else {}


def _model(folder: Path) -> Iterator[str]:
    if folder.is_file():
        yield f"expected a folder, found the file {str(folder)!r}; name the folder that holds config.json"
    elif not folder.is_dir():
        yield f"expected a folder, found no {str(folder)!r}{_neighbour(folder)}; nothing is downloaded"
    elif not (folder / "config.json").is_file():
        yield f"expected config.json in {str(folder)!r}, found none; name the folder of a transformers model"


def _pattern(pattern: str) -> Iterator[str]:
    expanded = str(Path(pattern).expanduser())
    if glob.has_magic(expanded):
        if not any(Path(found).is_file() for found in glob.iglob(expanded, recursive=True)):
            yield f"expected files that match {pattern!r}, found none; {HIDDEN}: is it relative to {_here()!r}?"
    elif Path(expanded).is_dir():
        yield f"expected a file or a pattern, found the folder {pattern!r}; write {pattern.rstrip('/')}/**/*.txt"
    elif not Path(expanded).is_file():
        yield f"expected a file, found no {pattern!r}{_neighbour(Path(expanded))}; is it relative to {_here()!r}?"


def _here() -> str:
    return str(Path.cwd())


def _neighbour(path: Path) -> str:
    folder = path.parent
    return nearest(path.name, sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ""
