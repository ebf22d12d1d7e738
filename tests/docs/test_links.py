"""Every link from one document to another file of the repository leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.blocks import ROOT, documents

LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_links_lead_somewhere(document: Path) -> None:
    missing = [link for link in LINK.findall(document.read_text("utf-8")) if not (document.parent / link).exists()]
    assert not missing, f"{document.relative_to(ROOT)} links to {', '.join(missing)}"
