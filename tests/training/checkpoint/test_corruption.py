"""Bytes that are not the bytes that were saved are found, named, and never used."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fourfold.training import checkpoint
from fourfold.training.checkpoint import CheckpointError, Corrupted, latest, load, verification
from fourfold.training.checkpoint.manifest import seal
from fourfold.training.checkpoint.safetensors_file import header
from fourfold.training.checkpoint.verification import check_all

from .conftest import empty_pair, save_pair


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_a_flipped_byte_of_a_tensor_names_file_tensor_hashes_and_the_good_one(folder):
    save_pair(folder, 1)
    newer = save_pair(folder, 2)
    file = newer / "rank-00001.safetensors"
    flip(file, header(file).spans["w[3:5, 0:3]"][0] + 5)
    assert latest(folder) == newer, "sizes and the manifest's hash cannot show it"
    with pytest.raises(Corrupted) as caught:
        load(newer, empty_pair())
    text = str(caught.value)
    assert "rank-00001.safetensors: tensor 'w', box [3:5, 0:3]: expected the hash" in text
    assert len([word for word in text.replace(",", " ").replace(";", " ").split() if len(word) == 64]) == 2
    assert f"{folder / 'step-00000001'} is whole: load that one" in text


def test_every_byte_of_every_file_is_covered_by_a_hash(folder):
    path = save_pair(folder, 1)
    check_all(path)
    for file in path.iterdir():
        for at in range(0, file.stat().st_size, 13):
            flip(file, at)
            with pytest.raises(Corrupted):
                check_all(path)
            flip(file, at)
    check_all(path)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json", "manifest.sha256"])
def test_a_truncated_file_is_never_chosen_nor_passed_over(folder, name):
    newer = [save_pair(folder, 1), save_pair(folder, 2)][1]
    data = (newer / name).read_bytes()
    words = f"{name if 'rank' in name else 'manifest.json'}.*step-00000001 is whole: load that one"
    for length in (0, 5, len(data) // 2, len(data) - 1):
        (newer / name).write_bytes(data[:length])
        with pytest.raises(Corrupted, match=words):
            latest(folder)
        with pytest.raises(Corrupted, match=words):
            load(newer, empty_pair())


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "manifest.json", "manifest.sha256"])
def test_a_missing_file_is_never_chosen_nor_passed_over(folder, name):
    newer = [save_pair(folder, 1), save_pair(folder, 2)][1]
    (newer / name).unlink()
    with pytest.raises(Corrupted, match=f"{name}.*step-00000001 is whole"):
        latest(folder)
    with pytest.raises(CheckpointError, match=name):
        load(newer, empty_pair())


def test_what_is_told_to_go_on_from_the_whole_one_does(folder):
    """The command in the message is run as it stands; the damaged one is kept, under a name that is never read."""
    older, newer = save_pair(folder, 1), save_pair(folder, 2)
    flip(newer / "manifest.json", 100)
    with pytest.raises(Corrupted) as caught:
        latest(folder)
    subprocess.run(shlex.split(str(caught.value).split("`")[1]), check=True)
    assert latest(folder) == older
    assert (folder / "damaged-step-00000002" / "manifest.json").exists()
    flip(older / "manifest.json", 100)
    with pytest.raises(Corrupted, match="no other checkpoint beside it is whole") as caught:
        latest(folder)
    subprocess.run(shlex.split(str(caught.value).split("`")[1]), check=True)
    assert latest(folder) is None


def test_one_that_is_removed_while_it_is_looked_at_is_no_damage(folder, monkeypatch):
    """Another process may prune, or publish the same step again, at any moment: what is there then is looked at."""
    older, newer = save_pair(folder, 1), save_pair(folder, 2)
    really = verification.check

    def check(path):
        if path == newer:
            shutil.rmtree(newer)
        return really(path)

    monkeypatch.setattr(verification, "check", check)
    assert latest(folder) == older


def test_files_swapped_between_ranks_are_found(folder):
    path = save_pair(folder, 1)
    one, two = path / "rank-00000.safetensors", path / "rank-00001.safetensors"
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    with pytest.raises(Corrupted):
        load(path, empty_pair())


def test_only_what_is_read_is_verified(folder):
    """A rank that wants the first rows does not pay for the other writer's file, nor stumble over it."""
    path = save_pair(folder, 1)
    file = path / "rank-00001.safetensors"
    flip(file, file.stat().st_size - 1)
    wanted = empty_pair()[0]
    first = type(wanted)("w", (5, 3), (0, 0), wanted.tensor[:2])
    load(path, [first], strict=False)
    assert torch.equal(first.tensor, torch.arange(6.0).view(2, 3) + 1)


def test_a_manifest_cannot_lead_outside_its_folder(folder):
    path = save_pair(folder, 1)
    text = (path / "manifest.json").read_text().replace("rank-00001.safetensors", "../elsewhere.safetensors")
    (path / "manifest.json").write_text(text)
    (path / "manifest.sha256").write_bytes(seal(text.encode()))
    with pytest.raises(Corrupted, match="no data file of a checkpoint"):
        load(path, empty_pair())


def test_no_pickle_is_written_and_none_can_be_read(folder):
    """Every file is JSON, a checksum line or safetensors; no code of the package names a reader of pickles."""
    for file in save_pair(folder, 1).iterdir():
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            assert data[8:9] == b"{", "the header's length, then JSON"
            with safe_open(file, framework="pt") as opened:
                assert list(opened.keys())
        elif file.suffix == ".json":
            json.loads(data)
        else:
            assert re.fullmatch(rb"[0-9a-f]{64}  manifest.json\n", data)
    sources = [path.read_text() for path in Path(*checkpoint.__path__).glob("*.py")]
    assert len(sources) > 10
    for word in ("import pickle", "torch.load", "torch.save", "FileSystemReader"):
        assert not any(word in source for source in sources)
