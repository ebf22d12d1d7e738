"""The fenced blocks of the documents, and how they want to be run.

A comment on the line before a block says more:

    <!-- not run: REASON -->      the block is shown only (the reason is for the reader of the source)
    <!-- run instead: COMMAND --> a shorter form of the same command
    <!-- exits: 2 -->             the last command ends with this code
    <!-- file: PATH -->           the block is the content of a file; README's are there for its commands
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("console", "bash", "sh", "shell")

_MARK = re.compile(r"^<!-- (not run|run instead|exits|file): (.+?) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, its text, and the marks before it."""

    document: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    @property
    def runs(self) -> bool:
        """A shell or Python block that is neither a file nor marked as only shown."""
        return self.language in (*SHELL, "python") and not self.marks.keys() & {"not run", "file"}

    @property
    def script(self) -> str:
        """What is run for this block: shell text, or Python text for a Python block."""
        if "run instead" in self.marks:
            return self.marks["run instead"]
        if self.language != "console":
            return self.text
        lines = self.text.splitlines()
        return "\n".join(line[2:] for line in lines if line.startswith(("$ ", "> ")))


def documents() -> list[Path]:
    """Every document whose commands are run."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
    return [*pages, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(document: str, text: str) -> list[Block]:
    """The fenced blocks of a document, in order.

    Raises:
        ValueError: a fence that is never closed, or a mark that belongs to no block.
    """
    found: list[Block] = []
    marks: dict[str, str] = {}
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        if match := _MARK.match(line):
            marks[match[1]] = match[2]
        elif line.startswith("```"):
            body = _body(lines, f"{document}:{number}")
            found.append(Block(document, number, line[3:].strip(), body, marks))
            marks = {}
        elif marks and line.strip():
            raise ValueError(f"{document}:{number}: {', '.join(marks)} stands before no block")
    return found


def _body(lines: enumerate[str], where: str) -> str:
    """The lines up to the closing fence, which is consumed."""
    body: list[str] = []
    for _, line in lines:
        if line.startswith("```"):
            return "".join(f"{one}\n" for one in body)
        body.append(line)
    raise ValueError(f"{where}: the block is never closed")


def all_blocks() -> list[Block]:
    """The blocks of every document."""
    return [
        block for path in documents() for block in blocks(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    ]
