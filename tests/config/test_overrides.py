"""Overrides: TOML values, bare words as a file would hold them, laid over the file's settings."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from fourfold.config.overrides import merge, parse


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3", 3),
        ("-1", -1),
        ("1e-4", 1e-4),
        ("true", True),
        ("null", None),
        ("", None),
        (".5", 0.5),
        ("runs/a-b", "runs/a-b"),
        ("no", "no"),
        ("8x rtx4090", "8x rtx4090"),
        ('"3"', "3"),
        ("'null'", "null"),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("{data = 2}", {"data": 2}),
        ("{tensor: {algorithm: 2.5d, q: 2}, z: null}", {"tensor": {"algorithm": "2.5d", "q": 2}, "z": None}),
        ("{files: [a.txt, b c.txt]}", {"files": ["a.txt", "b c.txt"]}),
        ("a=b", "a=b"),
    ],
)
def test_values(written: str, value: Any) -> None:
    overrides, problems = parse([f"a.b={written}"])
    assert problems == []
    assert overrides[0].path == ("a", "b")
    assert (type(overrides[0].value), overrides[0].value) == (type(value), value)


@pytest.mark.parametrize(
    ("written", "advised"),
    [
        ("[notes/sub/b.txt]", """'data.files=["notes/sub/b.txt"]'"""),
        ("[a.txt, b c.txt]", """'data.files=["a.txt", "b c.txt"]'"""),
        ("[a.txt", None),
        ("[a.txt, 'b.txt]", None),
    ],
)
def test_a_list_of_bare_words_is_given_back_so_that_it_can_be_pasted(written: str, advised: str | None) -> None:
    _, (problem,) = parse([f"data.files={written}"])
    assert problem.text.endswith(f"write {advised}" if advised else "put the argument in single quotes for the shell")
    if advised:
        (again,), problems = parse(shlex.split(advised))
        assert (again.path, problems) == (("data", "files"), [])


@pytest.mark.parametrize(
    ("written", "advised"),
    [
        ("{tensor=4d}", """'plan.placement={tensor="4d"}'"""),
        ("{tensor={algorithm=2.5d, q = 2}, z=1}", """'plan.placement={tensor={algorithm="2.5d", q = 2}, z=1}'"""),
        ("{tensor={algorithm=4d}", None),
        ("{4d}", None),
        ("{tensor: 4d, z}", None),
    ],
)
def test_a_table_of_bare_words_is_given_back_so_that_it_can_be_pasted(written: str, advised: str | None) -> None:
    _, (problem,) = parse([f"plan.placement={written}"])
    assert problem.text.endswith(f"write {advised}" if advised else "put the argument in single quotes for the shell")
    if advised:
        (again,), problems = parse(shlex.split(advised))
        assert (again.path, problems) == (("plan", "placement"), [])


@pytest.mark.parametrize(
    ("arguments", "advised"),
    [
        (
            ["plan.placement={tensor=algorithm=4d}", "plan.placement={tensor=y=2}"],
            """'plan.placement={tensor={algorithm="4d",y=2}}'""",
        ),
        (
            ["plan.placement.tensor=algorithm=2.5d", "plan.placement.tensor=q=2", "plan.placement.tensor=d=2"],
            """'plan.placement.tensor={algorithm="2.5d",q=2,d=2}'""",
        ),
        (["plan.placement=z=2", "plan.placement=zap=gradients"], """'plan.placement={z=2,zap="gradients"}'"""),
    ],
)
def test_what_a_shell_has_taken_apart_is_put_together_again(arguments: list[str], advised: str) -> None:
    overrides, (problem,) = parse([*arguments, "train.steps=3"])
    assert [override.path for override in overrides] == [("train", "steps")]
    made = f"the shell has made {len(arguments)} arguments of the braces of one"
    assert problem.text == f"{made}; write {advised}"
    (_,), problems = parse(shlex.split(advised))
    assert problems == []


def test_a_yaml_table_wants_blanks_after_its_colons() -> None:
    _, (problem,) = parse(["plan.placement={tensor:{algorithm:4d}}"])
    assert problem.text.endswith("write a blank after each colon, or = in its place and quotes around text")


def test_they_are_laid_over_and_the_file_stays_as_it_was() -> None:
    settings = {"train": {"steps": 3, "batch": 4}, "plan": "auto"}
    overrides, _ = parse(["train.steps=5", "plan.placement.data=2", "run.name=a"])
    merged, places = merge(settings, overrides)
    assert merged == {
        "train": {"steps": 5, "batch": 4},
        "plan": {"placement": {"data": 2}},
        "run": {"name": "a"},
    }
    assert settings == {"train": {"steps": 3, "batch": 4}, "plan": "auto"}
    assert set(places) == {
        ("train", "steps"),
        ("plan",),
        ("plan", "placement"),
        ("plan", "placement", "data"),
        ("run",),
        ("run", "name"),
    }


def test_a_mapping_replaces_the_mapping() -> None:
    overrides, _ = parse(["plan={placement = {data = 2}}", "plan.schedule=accumulate"])
    merged, _ = merge({"plan": {"placement": {"z": 2}, "sync": "bsp"}}, overrides)
    assert merged == {"plan": {"placement": {"data": 2}, "schedule": "accumulate"}}


def test_each_that_is_malformed_is_one_problem() -> None:
    overrides, problems = parse(["a", "=1", "a.=1", "b=[1", "c=1", "c=2"])
    assert [override.path for override in overrides] == [("c",)]
    assert [problem.key for problem in problems] == ["", "", "", "b", "c"]
