"""Where text comes from: the standard library's own source, or a person's files. A corpus is a list of documents."""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGES = {"site-packages", "dist-packages"}
"""Folders of installed packages inside the standard library's folder: not part of it."""
SUITES = {"test", "tests", "idle_test"}
"""The library's own test suites: more than half of its bytes, some of them deliberately not UTF-8."""
TABLES = {"encodings", "pydoc_data"}
"""A fifth of the rest that nobody wrote as code: tables of hexadecimal numbers, and the language reference as text."""


class CorpusError(ValueError):
    """A corpus that cannot be trained on: says which file or setting, what was expected and found, what to try."""


class Document(NamedTuple):
    """One text file. `name` is what errors print and what the order of documents follows."""

    name: str
    path: Path

    def read(self) -> str:
        """The text.

        Raises:
            CorpusError: the file cannot be read, or is not UTF-8 (names the byte).
        """
        try:
            return self.path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{self.name}: expected UTF-8 text, found the byte 0x{error.object[error.start]:02x} at offset "
                f"{error.start}; convert the file to UTF-8, or leave it out of data.files"
            ) from error
        except OSError as error:
            raise CorpusError(f"{self.name}: cannot read it ({error.strerror}); check data.files") from error


def stdlib(root: Path | None = None) -> list[Document]:
    """The source of the running Python's standard library, sorted by path, without packages, test suites and tables.

    Raises:
        CorpusError: this Python has no library source on disk (a frozen or zipped one).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        folders = set(path.relative_to(root).parts[:-1])
        if not folders & (PACKAGES | SUITES | TABLES):
            found.append(Document(path.relative_to(root).as_posix(), path))
    if not found:
        raise CorpusError(
            f"data.name: stdlib: expected the library's source under {root}, found no *.py file; "
            "use data.name: text with your own data.files"
        )
    return sorted(found)


def files(patterns: Sequence[str]) -> list[Document]:
    """The files that the patterns name (`**` descends), each once, sorted by path.

    Raises:
        CorpusError: a pattern that matches nothing, or a folder where a file was expected.
    """
    found: set[str] = set()
    for pattern in patterns:
        matches = glob.glob(pattern, recursive=True)
        if not matches:
            raise CorpusError(f"data.files: {pattern!r} matches no file below {Path.cwd()}; check the path")
        plain = [match for match in matches if Path(match).is_file()]
        if not plain:
            raise CorpusError(f"data.files: {pattern!r} is a folder; to take its files say {pattern.rstrip('/')}/**/*")
        found.update(plain)
    return [Document(name, Path(name)) for name in sorted(found)]


def texts(documents: Sequence[Document], limit_bytes: int | None = None) -> Iterator[str]:
    """The documents' texts in order, cut after `limit_bytes` bytes of UTF-8 in all (never inside a character)."""
    left = limit_bytes
    for document in documents:
        text = document.read()
        if left is None:
            yield text
            continue
        encoded = text.encode("utf-8")[:left]
        yield encoded.decode("utf-8", errors="ignore")
        left -= len(encoded)
        if left <= 0:
            return
