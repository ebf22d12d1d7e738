"""TOML keeps the line of every key."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.config import toml_text

TEXT = """\
# a comment
seed = 3

[optimizer]
lr = 1e-4
betas = [
  0.9,
  0.95,
]
[plan.placement]
z = 2   # [not.a.table]
[plan.schedule]
name = '''
[train]
steps = 3
'''
[run]
folder.inner = 1
"launch" = {threads = 2, workers = 1}
"""


def test_every_key_has_the_line_on_which_its_statement_begins() -> None:
    assert toml_text.parse(TEXT, "a.toml").lines == {
        ("seed",): 2,
        ("optimizer",): 4,
        ("optimizer", "lr"): 5,
        ("optimizer", "betas"): 6,
        ("plan",): 12,
        ("plan", "placement"): 10,
        ("plan", "placement", "z"): 11,
        ("plan", "schedule"): 12,
        ("plan", "schedule", "name"): 13,
        ("run",): 17,
        ("run", "folder"): 18,
        ("run", "folder", "inner"): 18,
        ("run", "launch"): 19,
        ("run", "launch", "threads"): 19,
        ("run", "launch", "workers"): 19,
    }


def test_values_are_those_of_the_standard_library() -> None:
    settings = toml_text.parse(TEXT, "a.toml").settings
    assert settings["optimizer"] == {"lr": 1e-4, "betas": [0.9, 0.95]}
    assert settings["plan"]["schedule"]["name"] == "[train]\nsteps = 3\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-4", 1e-4),
        ("1_000", 1000),
        ("true", True),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ("2020-01-01", "2020-01-01"),
        ("12:30:00", "12:30:00"),
    ],
)
def test_one_value(text: str, value: Any) -> None:
    found = toml_text.value(text)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text", ["", "here", "[1", "1\nother = 2", "[" * 5000])
def test_what_is_not_one_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        toml_text.value(text)


def test_a_statement_too_long_to_follow_loses_only_its_lines() -> None:
    text = "a = [\n" + "1,\n" * (toml_text.LONGEST + 10) + "]\nb = 2\n"
    document = toml_text.parse(text, "a.toml")
    assert document.settings["b"] == 2
    assert document.lines == {}
