"""The names on the architecture page are names of the code."""

from __future__ import annotations

import re

from docs.blocks import ROOT

PAGE = ROOT / "docs" / "architecture.md"


def test_every_name_is_in_the_code() -> None:
    shown = re.findall(r"`([^`\n]+)`", PAGE.read_text("utf-8"))
    named = {word for text in shown for word in re.findall(r"[A-Za-z_]\w+", text)}
    code = "".join(path.read_text("utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    assert len(named) > 100
    missing = sorted(named - set(re.findall(r"\w+", code)))
    assert not missing, f"docs/architecture.md names {', '.join(missing)}, which src/ does not hold"
