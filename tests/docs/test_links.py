"""Every link and every path that a document names leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.blocks import ROOT, all_blocks, documents

LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
NAMED = re.compile(r"(?<![\w/])((?:src|tests|benchmarks|examples|docs|scripts)/[\w/.-]*\w(?:\.\w+)?)(?![\w*])")
"""A path of the repository that a text names."""


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_links_lead_somewhere(document: Path) -> None:
    missing = [link for link in LINK.findall(document.read_text("utf-8")) if not (document.parent / link).exists()]
    assert not missing, f"{document.relative_to(ROOT)} links to {', '.join(missing)}"


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_paths_that_are_named_exist(document: Path) -> None:
    examples = {block.marks["file"] for block in all_blocks() if "file" in block.marks}
    named = set(NAMED.findall(document.read_text("utf-8"))) - examples
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert not missing, f"{document.relative_to(ROOT)} names {', '.join(missing)}"
