"""The release notes are made of fragments, one a change, and they can be made."""

from __future__ import annotations

import subprocess
import sys
import tomllib

from house.rules import ROOT


def test_the_fragments_make_release_notes() -> None:
    command = [sys.executable, "-m", "towncrier", "build", "--draft"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fragments = [one for one in (ROOT / "changelog.d").glob("*.md") if one.name != "README.md"]
    assert fragments
    for fragment in fragments:
        first = " ".join(fragment.read_text().split())[:60]
        assert first in " ".join(done.stdout.split()), fragment.name


def test_every_fragment_has_a_type_that_exists() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    types = {entry["directory"] for entry in settings["type"]}
    for fragment in (ROOT / "changelog.d").glob("*.md"):
        assert fragment.name == "README.md" or fragment.suffixes[0].lstrip(".") in types, fragment.name


def test_the_changelog_has_the_place_where_they_go() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    assert settings["start_string"] in (ROOT / "CHANGELOG.md").read_text()
