"""YAML is read by version 1.2's core schema, and what is written is read back."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.config import yaml_text
from fourfold.config.problem import ConfigError

# YAML 1.2.2, section 10.3.2 (tag resolution of the core schema), with the words that YAML 1.1 takes for booleans,
# sexagesimal numbers, dates and underscored numbers, all of which 1.2 reads as text.
SCALARS: list[tuple[str, Any]] = [
    ("", None),
    ("~", None),
    ("null", None),
    ("NULL", None),
    ("true", True),
    ("False", False),
    ("0", 0),
    ("-19", -19),
    ("+12", 12),
    ("007", 7),
    ("0o17", 15),
    ("0xFF", 255),
    ("1e-4", 1e-4),
    ("1E3", 1000.0),
    ("12.", 12.0),
    (".5", 0.5),
    ("-2E+05", -200000.0),
    (".inf", math.inf),
    ("-.INF", -math.inf),
    ("no", "no"),
    ("yes", "yes"),
    ("on", "on"),
    ("Off", "Off"),
    ("y", "y"),
    ("1_000", "1_000"),
    ("12:30:45", "12:30:45"),
    ("2020-01-01", "2020-01-01"),
    ("0b11", "0b11"),
    ("0x", "0x"),
    ("1e", "1e"),
    ("=", "="),
    ("<<", "<<"),
    ("8x rtx4090", "8x rtx4090"),
]


@pytest.mark.parametrize(("text", "value"), SCALARS, ids=[repr(text) for text, _ in SCALARS])
def test_plain_scalars_resolve_by_the_core_schema(text: str, value: object) -> None:
    found = yaml_text.parse(f"key: {text}\n", "a.yaml").settings["key"]
    assert (type(found), found) == (type(value), value)
    assert (type(yaml_text.scalar(text)), yaml_text.scalar(text)) == (type(value), value)


def test_not_a_number_is_one() -> None:
    assert math.isnan(yaml_text.scalar(".nan"))


@pytest.mark.parametrize("text", ["'1e-4'", '"1e-4"', "!!str 1e-4"])
def test_quoted_numbers_are_text(text: str) -> None:
    assert yaml_text.parse(f"key: {text}\n", "a.yaml").settings == {"key": "1e-4"}


def test_every_key_and_item_has_its_line() -> None:
    text = "# a\nseed: 1\n\ntrain:\n  steps: 3\n  sample: {prompt: a,\n    tokens: 4}\nfiles:\n- a\n- b\n"
    assert yaml_text.parse(text, "a.yaml").lines == {
        ("seed",): 2,
        ("train",): 4,
        ("train", "steps"): 5,
        ("train", "sample"): 6,
        ("train", "sample", "prompt"): 6,
        ("train", "sample", "tokens"): 7,
        ("files",): 8,
        ("files", "0"): 9,
        ("files", "1"): 10,
    }


def test_keys_are_text_whatever_they_look_like() -> None:
    assert yaml_text.parse("1: a\ntrue: b\nno: c\n", "a.yaml").settings == {"1": "a", "true": "b", "no": "c"}


def test_aliases_within_bounds_are_read() -> None:
    assert yaml_text.parse("a: &x [1, 2]\nb: *x\n", "a.yaml").settings == {"a": [1, 2], "b": [1, 2]}


def test_a_tag_constructs_nothing() -> None:
    document = yaml_text.parse("a: !!python/name:os.system\nb: !thing {c: 1}\n", "a.yaml")
    assert document.settings == {"a": None, "b": None}
    assert [problem.key for problem in document.problems] == ["a", "b"]


def test_the_depth_bound_is_exact() -> None:
    # The document is at depth 1, its keys' values at 2.
    inside = yaml_text.DEEPEST - 2
    yaml_text.parse("a: " + "[" * inside + "1" + "]" * inside, "a.yaml")
    with pytest.raises(ConfigError, match="nested too deep"):
        yaml_text.parse("a: " + "[" * (inside + 1) + "1" + "]" * (inside + 1), "a.yaml")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=20)
    | st.sampled_from([text for text, _ in SCALARS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab:#-1", min_size=1, max_size=4), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "1", "no", "null", "~"]), PLAIN, min_size=1))
def test_what_is_written_is_read_back(settings: dict[str, Any]) -> None:
    found = yaml_text.parse(yaml_text.dump(settings), "a.yaml")
    assert (found.settings, found.problems) == (settings, [])
    assert repr(found.settings) == repr(settings)
