"""The arithmetic of arenas: every logical element lies in exactly one shard, at one place."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawn import Weights, shapes, weights
from fourfold.placement.layout import FROZEN, LINE, Layout
from fourfold.placement.rows import share


def alone(shape: tuple[int, ...], parts: int) -> Layout:
    return Layout.of([("w", shape, "plain")], parts)


@given(weights, st.integers(1, 5))
def test_pieces_tile_every_weight_and_never_overlap_in_the_shard(listed: Weights, parts: int) -> None:
    layout = Layout.of(listed, parts)
    covered = {slot.name: torch.zeros(slot.shape, dtype=torch.int64) for slot in layout.slots}
    for index in range(parts):
        used = torch.zeros(layout.size, dtype=torch.int64)
        for slot in layout.slots:
            pieces = slot.pieces(index)
            assert pieces or slot.shape == ()
            for piece in pieces:
                piece.of(used).add_(1)
                box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
                covered[slot.name][box or ...] += 1
                assert slot.shard_start <= piece.start and piece.start + piece.numel <= slot.shard_start + slot.segment
        assert int(used.max()) <= 1
    assert all(bool((count == 1).all()) for count in covered.values())


@given(weights, st.integers(1, 5))
def test_the_end_of_a_segment_alone_is_padded(listed: Weights, parts: int) -> None:
    """Segments and full weights begin on lines; a segment has less than a line beyond ceil(rows / parts) rows."""
    layout = Layout.of(listed, parts)
    shard = full = 0
    for slot in layout.slots:
        assert (slot.shard_start, slot.full_start) == (shard, full)
        assert slot.rows * slot.width == slot.numel == prod(slot.shape)
        assert slot.held == -(-slot.rows // parts)
        assert slot.segment % LINE == slot.shard_start % LINE == slot.full_start % LINE == 0
        assert 0 <= slot.segment - slot.held * slot.width == slot.padding < LINE
        shard += slot.segment
        full += -(-slot.held * slot.width * parts // LINE) * LINE
    assert (layout.size, layout.full, layout.gathered) == (shard, full, shard * parts)
    assert layout.padded == any(slot.padding for slot in layout.slots)
    if parts == 1:
        assert all(slot.shard_start == slot.full_start for slot in layout.slots) and layout.full == layout.size


@given(shapes, st.integers(1, 5))
def test_no_rank_holds_more_than_twice_its_share_and_a_line(shape: tuple[int, ...], parts: int) -> None:
    """Whatever the shape: fewer rows than ranks too."""
    (slot,) = alone(shape, parts).slots
    assert slot.segment < 2 * slot.numel / parts + LINE + 1
    if shape and shape[0] >= parts:
        assert (slot.rows, slot.width) == (shape[0], prod(shape[1:]))
        assert all(len(slot.pieces(index)) == 1 for index in range(parts))


@pytest.mark.parametrize(
    ("shape", "parts", "rows", "shard"),
    [
        ((1, 1_000_003), 4, 1_000_003, 250_016),  # 250,001 and 15 of padding
        ((50_257, 3), 4, 50_257, 37_696),  # 12,565 rows of 3, and 1
        ((1, 197, 768), 4, 197, 38_400),  # 50 rows of 768
        ((2, 1_000), 4, 2_000, 512),
        ((768, 768), 8, 768, 73_728),
        ((10,), 4, 10, 16),
        ((), 4, 1, 16),
    ],
    ids=str,
)
def test_by_hand(shape: tuple[int, ...], parts: int, rows: int, shard: int) -> None:
    layout = alone(shape, parts)
    assert (layout.slots[0].rows, layout.size) == (rows, shard)


@given(weights, st.integers(1, 6))
def test_trained_weights_are_a_prefix_and_groups_are_contiguous(listed: Weights, parts: int) -> None:
    layout = Layout.of(listed, parts)
    ends = [0]
    for group, first, last in layout.groups():
        assert group != FROZEN and first == ends[-1] and last > first
        ends.append(last)
    assert layout.trained == ends[-1]
    assert all(slot.shard_start >= layout.trained for slot in layout.slots if slot.group == FROZEN)


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_every_row_is_computed_once_and_in_order(rows: int, microbatches: int, parts: int) -> None:
    shares = [share(rows, microbatches, parts, m, p) for m in range(microbatches) for p in range(parts)]
    assert [row for piece in shares for row in piece] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 2
