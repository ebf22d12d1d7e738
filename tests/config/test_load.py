"""A file and overrides become one validated config that knows where each setting was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.config import Config, ConfigError, Problem, load, resolved

YAML = "seed: 7\noptimizer:\n  name: sgd\n  momentum: 0.9\nplan:\n  placement: {data: 2}\n"
TOML = 'seed = 7\n[optimizer]\nname = "sgd"\nmomentum = 0.9\n[plan.placement]\ndata = 2\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(YAML)
    (tmp_path / "a.toml").write_text(TOML)
    return tmp_path


def test_no_file_is_the_defaults() -> None:
    assert load().config == Config()


def test_both_formats_say_the_same(folder: Path) -> None:
    assert load("a.yaml").config == load("a.toml").config


def test_byte_order_marks_and_carriage_returns_are_read(folder: Path) -> None:
    for name, text in (("a.yaml", YAML), ("a.toml", TOML)):
        (folder / f"b{name}").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
        assert load(f"b{name}").config == load(name).config


def test_overrides_win(folder: Path) -> None:
    config = load("a.yaml", ["seed=8", "optimizer.momentum=0.5", "train.sample.prompt=a b"]).config
    assert (config.seed, config.to_dict()["optimizer"]["momentum"]) == (8, 0.5)
    assert config.train.sample is not None
    assert config.train.sample.prompt == "a b"


def test_origins(folder: Path) -> None:
    origins = load("a.yaml", ["plan.placement.z=1", "run.keep=2"]).origins
    assert origins.describe("seed") == "a.yaml:1"
    assert origins.describe("optimizer.momentum") == "a.yaml:4"
    assert origins.describe("optimizer.lr") == "a.yaml:2"
    assert origins.describe("plan.placement.data") == "a.yaml:6"
    assert origins.describe("plan.placement.z") == "command line"
    assert origins.describe("run.keep") == "command line"
    assert origins.describe("train.steps") == "a.yaml"


def test_what_an_override_replaced_has_no_origin_left(folder: Path) -> None:
    origins = load("a.yaml", ["plan=auto"]).origins
    assert origins.describe("plan.placement.data") == "command line"


def test_a_message_that_begins_with_its_key_finds_its_origin(folder: Path) -> None:
    origins = load("a.yaml").origins
    problem = origins.blame("plan.placement.data: expected 1, found 2")
    assert problem == Problem("a.yaml:6", "plan.placement.data", "expected 1, found 2")
    assert origins.blame("something else") == Problem("a.yaml", "", "something else")


def test_a_check_speaks_together_with_the_schema(folder: Path) -> None:
    def check(settings: object) -> list[tuple[str, str]]:
        return [("optimizer.momentum", "too much"), ("seed", "not said: the schema's word on a key comes first")]

    with pytest.raises(ConfigError) as caught:
        load("a.yaml", ["seed=-1"], [check])
    assert [(problem.key, problem.origin) for problem in caught.value.problems] == [
        ("optimizer.momentum", "a.yaml:4"),
        ("seed", "command line"),
    ]
    assert "at least 0" in caught.value.problems[1].text


@pytest.mark.parametrize("overrides", [[], ["optimizer.clip=null", "optimizer.clip_norm=inf", "hardware='1e-4'"]])
def test_the_resolved_text_is_read_back_equal(folder: Path, overrides: list[str]) -> None:
    config = load("a.yaml", overrides).config
    (folder / "resolved.yaml").write_text(resolved(config), encoding="utf-8")
    assert load("resolved.yaml").config == config


def test_problems_are_told_once_and_one_is_a_single_line() -> None:
    problem = Problem("a.yaml:1", "seed", "wrong")
    assert str(ConfigError([problem, problem])) == "a.yaml:1: seed: wrong"


def test_a_setting_that_was_not_written_is_a_default(folder: Path) -> None:
    loaded = load("a.yaml", ["run={keep = 2}"])
    assert loaded.origin("optimizer.momentum") == "a.yaml:4"
    assert loaded.origin("optimizer.lr") == "default"
    assert loaded.origin("run") == "command line"
    assert loaded.origin("run.keep") == "command line"
    assert loaded.origin("run.name") == "default"
    assert loaded.origin("seed.x") == "default"
