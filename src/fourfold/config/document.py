"""A config file's text: read once, kept with the line of every key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

from fourfold.config.problem import ConfigError, Path, Problem, nearest

LARGEST = 256 * 1024
"""Bytes of the largest config file that is read: a bigger file is something else (a checkpoint, a data set)."""


@dataclass
class Document:
    """Settings as plain values, the line of each key (from 1), and what the format itself refuses."""

    settings: dict[str, Any] = field(default_factory=dict)
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read(path: str) -> Document:
    """Read a YAML or TOML file, chosen by its ending.

    Raises:
        ConfigError: no such file, not a text file, an unknown ending, or text that is not in the file's format.
    """
    readers = {".yaml": _yaml, ".yml": _yaml, ".toml": _toml}
    ending = File(path).suffix.lower()
    text = _text(path)
    if ending not in readers:
        found = f"found {ending!r}" if ending else "found no ending"
        raise ConfigError([Problem(path, "", f"expected a file that ends in .yaml, .yml or .toml, {found}; rename it")])
    document = readers[ending](text, path)
    if not document.settings and not document.problems:
        empty = "expected settings, found none; write at least one, for instance seed: 1"
        raise ConfigError([Problem(path, "", empty)])
    return document


def _yaml(text: str, path: str) -> Document:
    from fourfold.config import yaml_text

    return yaml_text.parse(text, path)


def _toml(text: str, path: str) -> Document:
    from fourfold.config import toml_text

    return toml_text.parse(text, path)


def _text(path: str) -> str:
    try:
        size = File(path).stat().st_size
        if size > LARGEST:
            raise ConfigError(
                [Problem(path, "", f"expected a config file, found {size} bytes; is this the right file?")]
            )
        raw = File(path).read_bytes()
    except FileNotFoundError:
        raise ConfigError([Problem(path, "", f"no such file{_neighbour(path)}; check the path")]) from None
    except IsADirectoryError:
        raise ConfigError([Problem(path, "", "expected a file, found a folder; name the config file in it")]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            [Problem(path, "", f"cannot be read: {reason}; check the path and its permissions")]
        ) from error
    if b"\0" in raw:
        raise ConfigError([Problem(path, "", "expected UTF-8 text, found a binary file; is this the right file?")])
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        found = f"expected UTF-8 text, found the byte 0x{raw[error.start]:02x}; save the file as UTF-8"
        raise ConfigError([Problem(f"{path}:{line}", "", found)]) from None


def _neighbour(path: str) -> str:
    folder = File(path).parent
    if not folder.is_dir():
        return f", nor a folder {str(folder)!r}"
    return nearest(File(path).name, sorted(entry.name for entry in folder.iterdir()))
