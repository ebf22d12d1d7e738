"""The arithmetic of arenas: every logical element lies in exactly one shard, at one place."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.placement.arena import Arena
from fourfold.placement.layout import FROZEN, Layout
from fourfold.placement.precision import Precision
from fourfold.placement.rows import share

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)
weights = st.lists(st.tuples(shapes, st.sampled_from(["decay", "plain", FROZEN])), min_size=1, max_size=6)
FP64 = Precision(torch.float64, torch.float64, torch.float64)


def named(listed: list[tuple[tuple[int, ...], str]]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(f"w{index}", shape, group) for index, (shape, group) in enumerate(listed)]


@given(weights, st.integers(1, 6))
def test_pieces_tile_every_weight_and_never_overlap_in_the_shard(listed: list, parts: int) -> None:
    layout = Layout.of(named(listed), parts)
    covered = {slot.name: torch.zeros(slot.shape or (1,), dtype=torch.int64) for slot in layout.slots}
    for index in range(parts):
        used = torch.zeros(layout.size, dtype=torch.int64)
        for slot in layout.slots:
            piece = slot.piece(index)
            if piece is None:
                assert slot.shape == ()
                continue
            used[piece.start : piece.stop] += 1
            box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
            covered[slot.name][box if box else ...] += 1
        assert int(used.max()) <= 1
    assert all(bool((count == 1).all()) for count in covered.values())


@given(weights, st.integers(1, 6))
def test_trained_weights_are_a_prefix_and_groups_are_contiguous(listed: list, parts: int) -> None:
    layout = Layout.of(named(listed), parts)
    ends = [0]
    for group, first, last in layout.groups():
        assert group != FROZEN and first == ends[-1] and last > first
        ends.append(last)
    assert layout.trained == ends[-1]
    assert all(slot.shard_start >= layout.trained for slot in layout.slots if slot.group == FROZEN)


@given(weights, st.integers(1, 5), st.integers(0, 2**31))
def test_gathered_shards_are_the_weights_and_packed_gradients_come_back(listed: list, parts: int, seed: int) -> None:
    """fill -> gather -> unpack gives every weight; pack -> scatter gives every rank its rows."""
    generator = torch.Generator().manual_seed(seed)
    layout = Layout.of(named(listed), parts)
    whole = {slot.name: torch.randn(slot.numel, generator=generator, dtype=torch.float64) for slot in layout.slots}
    arenas = [Arena(layout, FP64, index, resident=False, device=torch.device("cpu")) for index in range(parts)]
    for arena in arenas:
        arena.fill(lambda name, start, stop, dtype: whole[name][start:stop].to(dtype))
    staged = torch.stack([arena.message() for arena in arenas])
    arena = arenas[0]
    arena.allocate()
    arena.unpack(staged)
    for name, view in arena.views().items():
        assert torch.equal(view.reshape(-1), whole[name])
    message = arena.pack([whole[slot.name] for slot in layout.trained_slots], torch.float64)
    for index, one in enumerate(arenas):
        assert torch.equal(message[index], one.shard[: layout.trained])


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_every_row_is_computed_once_and_in_order(rows: int, microbatches: int, parts: int) -> None:
    shares = [share(rows, microbatches, parts, m, p) for m in range(microbatches) for p in range(parts)]
    assert [row for piece in shares for row in piece] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 2
