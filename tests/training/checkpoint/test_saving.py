"""Writers come together by files alone; what goes wrong is said, and reaches someone."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from fourfold.training.checkpoint import (
    Box,
    CheckpointError,
    WriterLost,
    coordination,
    latest,
    layout,
    load,
    prepare,
    save,
)
from fourfold.training.checkpoint.verification import check_all

from .conftest import boxes, empty_pair, save_pair


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_what_was_there_at_the_call(folder):
    arena = torch.arange(200_000, dtype=torch.float32)
    state = {"position": [3]}
    saving = save(folder, 1, [Box.whole("a", arena)], state, rank=0, writers=[0])
    arena.fill_(-7)
    state["position"].append(4)
    found = torch.zeros(200_000)
    assert load(saving.wait(), [Box.whole("a", found)]) == {"position": [3]}
    assert torch.equal(found, torch.arange(200_000, dtype=torch.float32))


def test_wait_on_any_rank_means_that_the_whole_is_published(folder):
    first = save(folder, 1, boxes(1), {}, rank=1, writers=(0, 1))
    assert not first.done
    save(folder, 1, boxes(0), {}, rank=0, writers=(0, 1))
    check_all(first.wait())
    assert names(folder) == ["step-00000001"]
    assert names(first.path) == ["manifest.json", "manifest.sha256", "rank-00000.safetensors", "rank-00001.safetensors"]


def test_a_rank_that_does_not_write_has_nothing_to_wait_for(folder):
    assert save(folder, 1, boxes(0), {}, rank=2, writers=(0, 1)).wait() == folder / "step-00000001"
    assert not folder.exists()


def test_the_manifest_seal_is_one_that_sha256sum_reads(folder):
    digest, name = (save_pair(folder, 1) / "manifest.sha256").read_text().split()
    assert (len(digest), name) == (64, "manifest.json")


def test_the_last_k_are_kept_and_what_is_being_written_always(folder):
    for step in (1, 2, 3, 4):
        save_pair(folder, step, keep=2)
    assert names(folder) == ["step-00000003", "step-00000004"]
    save_pair(folder, 1, keep=1)
    assert names(folder) == ["step-00000001"]


def test_a_damaged_checkpoint_does_not_count_among_the_kept(folder):
    for step in (1, 2):
        save_pair(folder, step)
    (folder / "step-00000002" / "rank-00001.safetensors").unlink()
    save_pair(folder, 3, keep=2)
    assert names(folder) == ["step-00000001", "step-00000002", "step-00000003"]
    save_pair(folder, 4, keep=2)
    assert names(folder) == ["step-00000003", "step-00000004"]


def test_the_same_step_again_replaces_the_first(folder):
    save_pair(folder, 5)
    savings = [save(folder, 5, boxes(r, 50.0), {}, rank=r, writers=(0, 1)) for r in (0, 1)]
    wanted = empty_pair()
    load([saving.wait() for saving in savings][0], wanted)
    assert wanted[1].tensor == 50.0
    assert names(folder) == ["step-00000005"]


def test_a_crash_between_the_two_renames_loses_nothing(folder):
    path = save_pair(folder, 5)
    path.rename(folder / "step-00000005.replaced")
    moved = folder / "step-00000005.replaced"
    assert latest(folder) == moved
    check_all(moved)
    save_pair(folder, 5)
    assert names(folder) == ["step-00000005"]


def test_what_a_dead_run_left_is_never_chosen_and_cleared_by_the_next_save(folder):
    whole = save_pair(folder, 1)
    shutil.copytree(whole, folder / "step-00000009.part")
    assert latest(folder) == whole
    save_pair(folder, 2)
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_a_follower_that_joined_a_dead_runs_folder_starts_again(folder, monkeypatch):
    """The dead run's folder of the same step holds a begun save, both parts, and even a failure."""
    monkeypatch.setattr(coordination, "_GRACE", 30.0)
    shutil.copytree(save_pair(folder, 1), folder / "step-00000002.part")
    aside = folder / "step-00000002.part"
    (aside / layout.BEGIN).write_text(json.dumps({"save": "dead"}))
    (aside / layout.FAILED).write_text(json.dumps({"save": "dead", "rank": 0, "reason": "an old one"}))
    follower = save(folder, 2, boxes(1, 2.0), {}, rank=1, writers=(0, 1))
    while not (aside / layout.part_name(1)).exists():
        assert not follower.done
    path = save(folder, 2, boxes(0, 2.0), {}, rank=0, writers=(0, 1)).wait()
    assert follower.wait() == path
    wanted = empty_pair()
    load(path, wanted)
    assert torch.equal(wanted[0].tensor, torch.arange(15.0).view(5, 3) + 2)


def test_a_missing_writer_is_named(folder):
    with pytest.raises(WriterLost, match=r"no part from rank 1, 2 within 0.1 s \(1 of 3 writers delivered\)"):
        save(folder, 1, boxes(0), {}, rank=0, writers=(0, 1, 2), asynchronous=False, timeout=0.1)
    assert latest(folder) is None


def test_a_missing_coordinator_is_named(folder):
    with pytest.raises(WriterLost, match="rank 0, which coordinates, opened no save within 0.1 s"):
        save(folder, 1, boxes(1), {}, rank=1, writers=(0, 1), asynchronous=False, timeout=0.1)


def test_a_writer_that_cannot_write_says_why_to_all(folder):
    twice = [*boxes(1), boxes(1)[0]]
    savings = [save(folder, 1, hand, {}, rank=r, writers=(0, 1)) for r, hand in enumerate((boxes(0), twice))]
    with pytest.raises(
        WriterLost, match=r"rank 1 could not save: tensor 'w': the box \[3:5, 0:3\] was handed in twice"
    ):
        savings[0].wait()
    with pytest.raises(CheckpointError, match="handed in twice"):
        savings[1].wait()


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ([Box("w", (5, 3), (4, 0), torch.zeros(1, 3))], r"tensor 'w': expected boxes that cover all 15 elements"),
        (
            [Box("w", (5, 3), (2, 0), torch.zeros(3, 3))],
            r"boxes \[0:3, 0:3\] in rank-00000.* and \[2:5, 0:3\] in rank-00001",
        ),
        (
            [Box("w", (6, 3), (3, 0), torch.zeros(3, 3))],
            r"rank 0 saves shape \(5, 3\) of float32, rank 1 shape \(6, 3\)",
        ),
        ([Box("w", (5, 3), (3, 0), torch.zeros(2, 3).double())], "float32, rank 1 shape .* of float64"),
    ],
)
def test_boxes_that_do_not_tile_are_refused_by_name(folder, monkeypatch, second, words):
    monkeypatch.setattr(coordination, "_GRACE", 0.05)
    savings = [save(folder, 1, hand, {}, rank=r, writers=(0, 1)) for r, hand in enumerate((boxes(0), second))]
    with pytest.raises(CheckpointError, match=words):
        savings[0].wait()
    with pytest.raises(WriterLost, match=words):
        savings[1].wait()
    assert latest(folder) is None


def test_a_state_that_differs_between_ranks_is_refused_by_key(folder, monkeypatch):
    monkeypatch.setattr(coordination, "_GRACE", 0.05)
    savings = [save(folder, 1, boxes(r), {"a": 1, "seen": r}, rank=r, writers=(0, 1)) for r in (0, 1)]
    with pytest.raises(CheckpointError, match="rank 1 hands in another state than rank 0 in seen;"):
        savings[0].wait()
    with pytest.raises(WriterLost):
        savings[1].wait()


def test_an_error_that_nobody_waited_for_surfaces_once_at_the_next_save(folder):
    save(folder, 1, boxes(0), {}, rank=0, writers=[0])
    with pytest.raises(CheckpointError, match="expected boxes that cover"):
        save(folder, 2, [], {}, rank=0, writers=[0])
    save(folder, 3, [], {}, rank=0, writers=[0], asynchronous=False)
    assert latest(folder) == folder / "step-00000003"


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("x")
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(CheckpointError, match="expected a folder, found a file"):
            prepare(folder)
