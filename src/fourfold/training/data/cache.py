"""Token ids kept on disk, so that a corpus is tokenized once: raw arrays, written aside, renamed, hashed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fourfold.training.data.corpus import CorpusError
from fourfold.training.data.tokens import Ids

FORMAT = 1
"""Part of every key: raise it when what is written changes."""


@dataclass(frozen=True)
class Entry:
    """A tokenized corpus: memory-mapped ids of its two parts, and the tokenizer that made them."""

    train: Ids
    held: Ids
    tokenizer: Tokenizer


def folder(chosen: str | None) -> Path:
    """The cache folder: the chosen one, or fourfold's place in the user's cache directory of this system."""
    if chosen is not None:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fourfold"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fourfold"


def key(settings: dict[str, object], names_and_hashes: list[tuple[str, str]]) -> str:
    """The name of a tokenized corpus: a hash of its settings and of every document's name and content."""
    text = json.dumps([FORMAT, settings, names_and_hashes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def load(place: Path) -> Entry | None:
    """What lies in `place`, or None where there is nothing whole (missing, torn or changed: it is made again)."""
    try:
        manifest = json.loads((place / "corpus.json").read_text(encoding="utf-8"))
        if any(_digest(place / name) != digest for name, digest in manifest["sha256"].items()):
            return None
        dtype = np.dtype(manifest["dtype"])
        train, held = (_mapped(place / name, dtype) for name in ("train.bin", "held.bin"))
        return Entry(train, held, Tokenizer.from_file(str(place / "tokenizer.json")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(place: Path, train: Ids, held: Ids, tokenizer: Tokenizer) -> None:
    """Write aside, sync, rename: a reader sees all of it or nothing. Another process may win; both wrote the same.

    Raises:
        CorpusError: the folder cannot be written (read-only, full disk).
    """
    aside = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        aside.mkdir(parents=True, exist_ok=True)
        train.tofile(aside / "train.bin")
        held.astype(train.dtype).tofile(aside / "held.bin")
        (aside / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        names = ("train.bin", "held.bin", "tokenizer.json")
        digests = {name: _digest(aside / name) for name in names}
        manifest = {"format": FORMAT, "dtype": train.dtype.str, "sha256": digests}
        (aside / "corpus.json").write_text(json.dumps(manifest), encoding="utf-8")
        _sync(aside)
        if place.exists() and load(place) is None:
            shutil.rmtree(place)
        try:
            aside.rename(place)
        except OSError:
            if load(place) is None:
                raise
    except OSError as error:
        raise CorpusError(
            f"{place.parent}: cannot write the token cache ({error.strerror}); free some space or set data.cache "
            "to a folder that can be written"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _mapped(path: Path, dtype: np.dtype) -> Ids:
    """A raw array, memory-mapped (an empty file cannot be mapped)."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _sync(place: Path) -> None:
    for path in place.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
