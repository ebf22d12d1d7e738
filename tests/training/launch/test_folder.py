"""The run folder: named, confined, resumed, and written at once or not at all."""

import json

import pytest

from fourfold.config import Config
from fourfold.config.schema import RunFolder as Settings
from fourfold.training import folder
from fourfold.training.folder import FolderError


def config(runs, **more) -> Config:
    return Config(run=Settings(folder=str(runs), **more))


def test_a_new_run_is_named_by_time_and_settings_inside_the_folder_of_runs(tmp_path):
    place = folder.create(config(tmp_path / "runs"))
    assert place.path.parent == tmp_path / "runs"
    assert place.path.is_dir()
    date, clock, digest = place.path.name.split("-")
    assert (len(date), len(clock), len(digest)) == (8, 6, 6)


def test_a_name_that_is_taken_is_refused(tmp_path):
    folder.create(config(tmp_path, name="mine"))
    with pytest.raises(FolderError, match=r"mine is taken; go on with it by --resume"):
        folder.create(config(tmp_path, name="mine"))


def test_resume_finds_the_named_run_or_the_newest(tmp_path):
    for name in ("first", "second"):
        folder.create(config(tmp_path, name=name)).write_config(config(tmp_path, name=name))
    assert folder.create(config(tmp_path, name="first", resume=True)).path.name == "first"
    assert folder.create(config(tmp_path, resume=True)).path.name == "second"
    with pytest.raises(FolderError, match="no run at"):
        folder.create(config(tmp_path, name="third", resume=True))
    with pytest.raises(FolderError, match="no run in"):
        folder.create(config(tmp_path / "elsewhere", resume=True))


def test_a_resumed_run_keeps_seed_model_data_and_loss(tmp_path):
    before = config(tmp_path, name="mine")
    folder.create(before).write_config(before)
    other = before.model_copy(update={"seed": 99, "run": Settings(folder=str(tmp_path), name="mine", resume=True)})
    with pytest.raises(FolderError, match=r"run\.resume: seed changed"):
        folder.create(other)


def test_the_resolved_config_reads_back_equal(tmp_path):
    place = folder.create(config(tmp_path))
    place.write_config(config(tmp_path, name="mine"))
    assert place.read_config() == config(tmp_path, name="mine")


def test_a_folder_that_cannot_be_made_or_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FolderError, match=r"run\.folder: cannot make"):
        folder.create(config(tmp_path / "file"))
    with pytest.raises(FolderError, match="cannot write"):
        folder.write_text(tmp_path / "file" / "x", "text")


def test_writing_leaves_nothing_aside(tmp_path):
    folder.write_json(tmp_path / "a.json", {"x": 1})
    folder.write_json(tmp_path / "a.json", {"x": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_the_origin_says_what_a_reader_needs_to_repeat_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    origin = folder.describe_origin(["plan: data 2"])
    assert origin["versions"]["torch"]
    assert origin["git"] is None
    assert origin["plan"] == ["plan: data 2"]
    assert origin["launcher"] is None


def test_a_group_that_torchrun_starts_again_finds_its_run(tmp_path):
    for name, launcher in (("a", "one@1"), ("b", "two@2")):
        folder.write_json(tmp_path / name / "origin.json", {"launcher": launcher})
    found = folder.started_by(tmp_path, "one@1")
    assert found is not None
    assert found.path.name == "a"
    assert folder.started_by(tmp_path, "three@3") is None
