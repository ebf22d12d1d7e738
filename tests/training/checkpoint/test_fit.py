"""A checkpoint that does not fit what is asked for says so by name, and touches nothing."""

from __future__ import annotations

import pytest
import torch

from fourfold.training.checkpoint import Box, CheckpointError, load, save

from .conftest import empty_pair, save_pair


def test_missing_unexpected_and_shapes_are_named_with_the_nearest_names(folder):
    path = save_pair(folder, 1)
    wanted = [Box.whole("w", torch.full((5, 4), -1.0)), Box.whole("ss", torch.tensor(-1.0, dtype=torch.float64))]
    with pytest.raises(CheckpointError) as caught:
        load(path, wanted)
    text = str(caught.value)
    assert "missing: 'ss' (nearest: 's')" in text
    assert "unexpected: 's' (nearest: 'ss')" in text
    assert "shape of 'w': expected (5, 4), found (5, 3)" in text
    assert all(bool((box.tensor == -1).all()) for box in wanted)


def test_strict_counts_what_other_ranks_ask_for(folder):
    path = save_pair(folder, 1)
    only = empty_pair()[:1]
    with pytest.raises(CheckpointError, match="unexpected: 's'"):
        load(path, only)
    assert load(path, only, expected=["w", "s"]) == {"step": 1}
    assert load(path, only, strict=False) == {"step": 1}


def test_what_is_asked_for_must_be_there_even_when_not_strict(folder):
    with pytest.raises(CheckpointError, match="missing: 'v'"):
        load(save_pair(folder, 1), [Box.whole("v", torch.zeros(2))], strict=False)


def test_a_dtype_is_converted_only_when_allowed(folder):
    path = save_pair(folder, 1)
    wide = [Box.whole("w", torch.zeros(5, 3, dtype=torch.float64)), empty_pair()[1]]
    with pytest.raises(
        CheckpointError, match=r"dtype of 'w': expected float64, found float32 \(allow_cast=True converts\)"
    ):
        load(path, wide)
    load(path, wide, allow_cast=True)
    assert torch.equal(wide[0].tensor, torch.arange(15, dtype=torch.float64).view(5, 3) + 1)


def test_parameters_that_require_gradients_are_filled_in_place(folder):
    path = save_pair(folder, 1)
    weight = torch.nn.Parameter(torch.zeros(5, 3))
    load(path, [Box.whole("w", weight)], strict=False)
    assert weight[0, 0] == 1.0 and weight.requires_grad and weight.is_leaf


@pytest.mark.parametrize("path", ["nothing", "empty", "file"])
def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        load(tmp_path / path, [])


def test_boxes_must_lie_inside_their_tensor():
    with pytest.raises(
        CheckpointError, match=r"box of 'w': expected it inside the logical shape \(4, 3\), found \[3:5, 0:3\]"
    ):
        Box("w", (4, 3), (3, 0), torch.zeros(2, 3))
    with pytest.raises(CheckpointError, match="as many offsets and sizes"):
        Box("w", (4, 3), (0,), torch.zeros(4, 3))
    with pytest.raises(CheckpointError, match="complex64"):
        Box.whole("w", torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": (1, 2)}, r"state\['a'\].*tuple"),
        ({"a": [{"b": torch.zeros(1)}]}, r"state\['a'\]\[0\]\['b'\].*Tensor"),
        ({"a": {1: 2}}, r"state\['a'\].*key, found 1"),
    ],
)
def test_state_that_would_not_come_back_the_same_is_refused_at_once(folder, state, where):
    with pytest.raises(CheckpointError, match=where):
        save(folder, 1, [], state, rank=0, writers=[0])


def test_state_comes_back_to_the_last_bit(folder):
    state = {
        "lr": 0.1 + 0.2,
        "best": float("inf"),
        "seed": 2**63 + 1,
        "plan": {"z": [1, None, True, "ü"]},
        "tiny": 5e-324,
    }
    path = save(folder, 1, [], state, rank=0, writers=[0], asynchronous=False).wait()
    assert load(path, []) == state
