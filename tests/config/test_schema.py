"""The schema: every setting is documented, worded, strict; every default is valid; the tree is frozen."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fourfold.config import Config
from fourfold.config.explain import explain
from fourfold.config.schema import AdamW, Gpt, HfCausalLm, Section, Sgd, Stdlib, TextFiles, TokenFiles
from fourfold.config.shape import kinds, words


def fields(section: type[Section] = Config, above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield f"{above}{name}", field
        for kind in kinds(field).values():
            yield from fields(kind, f"{above}{name}.")


FIELDS = list(fields())


def test_the_plain_form_is_read_back_equal() -> None:
    config = Config(optimizer=Sgd(momentum=0.5), model=HfCausalLm(path="a"), plan={"placement": {"data": 2}})
    plain = config.to_dict()
    assert Config.model_validate(json.loads(json.dumps(plain))) == config
    assert plain["plan"] == {"placement": {"data": 2}}


def test_defaults_pass_their_own_validation() -> None:
    # pydantic takes defaults unseen; written out, they meet the validators.
    assert Config.model_validate(Config().to_dict()) == Config()


@pytest.mark.parametrize(("key", "field"), FIELDS, ids=[key for key, _ in FIELDS])
def test_every_setting_is_explained(key: str, field: FieldInfo) -> None:
    assert field.description
    assert words(field)
    assert explain(key).docs


def test_every_setting_refuses_what_it_does_not_hold() -> None:
    for key, _ in FIELDS:
        if key in ("plan", "model.config"):  # whatever they hold is the plan's, and transformers', to judge
            continue
        settings: object = {"nonsense": [object()]}
        for name in reversed(key.split(".")):
            settings = {name: settings}
        with pytest.raises(ValidationError):
            Config.model_validate(settings)


def test_kinds_are_chosen_by_name_and_have_a_default() -> None:
    assert isinstance(Config.model_validate({"model": {"layers": 2}}).model, Gpt)
    assert isinstance(Config.model_validate({"optimizer": {"eps": 1e-6}}).optimizer, AdamW)
    assert isinstance(Config.model_validate({"optimizer": {"name": "sgd"}}).optimizer, Sgd)
    assert isinstance(Config.model_validate({"data": {}}).data, Stdlib)
    assert isinstance(Config.model_validate({"data": {"name": "text", "files": ["a"]}}).data, TextFiles)
    assert isinstance(Config.model_validate({"data": {"name": "tokens", "files": ["a"]}}).data, TokenFiles)


def test_whole_numbers_pass_for_numbers_and_nothing_else_does() -> None:
    assert Config.model_validate({"optimizer": {"lr": 1}}).optimizer.lr == 1.0
    for wrong in (True, "1", None, [1.0]):
        with pytest.raises(ValidationError):
            Config.model_validate({"optimizer": {"lr": wrong}})


@pytest.mark.parametrize("infinity", ["inf", float("inf")])
def test_the_infinity_norm_may_be_word_or_number(infinity: object) -> None:
    assert Config.model_validate({"optimizer": {"clip_norm": infinity}}).optimizer.clip_norm == "inf"


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().seed = 2


def test_a_home_folder_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert Config.model_validate({"run": {"folder": "~/runs"}}).run.folder == "/home/someone/runs"


def test_the_json_schema_knows_every_setting() -> None:
    schema = Config.model_json_schema()
    known = {name for part in [schema, *schema["$defs"].values()] for name in part.get("properties", {})}
    assert {key.rpartition(".")[2] for key, _ in FIELDS} == known
    assert all(part["additionalProperties"] is False for part in [schema, *schema["$defs"].values()])
