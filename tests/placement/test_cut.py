"""How weights are cut over axes: every logical element lies in the right number of blocks, at one place of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.placement import cut as cut_module
from fourfold.placement.cut import Block, Cut, Share, deal
from fourfold.placement.layout import Layout


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def share(axis: str, size: int, ranks: int, unit: int = 1, parts: int = 1) -> Share:
    """`size` indices in `parts` equal parts, each dealt in units."""
    each = size // parts
    runs = [
        tuple(range(part * each + unit * at.start, part * each + unit * at.stop) for part in range(parts))
        for at in (deal(each // unit, ranks, index) for index in range(ranks))
    ]
    return Share(axis, tuple(runs))


def coordinates(**sizes: int) -> list[dict[str, int]]:
    return [dict(zip(sizes, at, strict=True)) for at in product(*map(range, sizes.values()))]


def test_dealt_units_are_neighbours_and_the_first_ranks_get_one_more() -> None:
    assert [list(deal(5, 3, index)) for index in range(3)] == [[0, 1], [2, 3], [4]]
    assert [len(deal(2, 3, index)) for index in range(3)] == [1, 1, 0]


def test_packed_parts_are_dealt_part_by_part() -> None:
    """q|k|v of 2 heads of 2 features over 2 ranks, as the columns of GPT-2's weight."""
    cut = Cut((2, 12), (None, share("y", 12, 2, unit=2, parts=3)))
    block = cut.at({"y": 1})
    assert block.shape == (2, 6)
    assert block.take(numbers((2, 12))).tolist() == [[2, 3, 6, 7, 10, 11], [14, 15, 18, 19, 22, 23]]
    assert [(part.offsets, part.sizes, part.start) for part in block.parts(0, 12)] == [
        ((0, 2), (2, 2), 0),
        ((0, 6), (2, 2), 2),
        ((0, 10), (2, 2), 4),
    ]


def test_copies_are_counted_once() -> None:
    """Two key-value heads on four ranks: pairs of neighbours hold the same; over x the weight is not cut at all."""
    heads = Share("y", tuple((range(2 * (index // 2), 2 * (index // 2) + 2),) for index in range(4)))
    cut = Cut((4, 3), (heads, None))
    assert heads.copies == 2
    owned = [at for at in coordinates(x=2, y=4) if cut.at(at).owned]
    assert owned == [{"x": 0, "y": 0}, {"x": 0, "y": 2}]


class Source:
    """Values of one weight, and how many elements it was asked for each time."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.asked = whole, list[int]()

    def __call__(self, name: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        self.asked.append(stop - start)
        return self.whole.reshape(-1)[start:stop].to(dtype)


class BoxSource(Source):
    """One that gives boxes as well."""

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        box = self.whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        self.asked.append(box.numel())
        return box.to(dtype)


@pytest.mark.parametrize("chunk", (1, 4, 7, 30, 1000))
@pytest.mark.parametrize("shape", ((), (11,), (6, 10), (3, 4, 10), (2, 1, 3, 10)), ids=str)
def test_a_block_is_read_in_chunks(shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first dim over x, the last one, packed of two parts, over y; any stretch of the block's elements."""
    monkeypatch.setattr(cut_module, "CHUNK", chunk)
    shares: list[Share | None] = [None] * len(shape)
    if len(shape) > 1:
        shares[-1] = share("y", shape[-1], 2, parts=2)
    if shape:
        shares[0] = share("x", shape[0], 2)
    for at in coordinates(x=2, y=2):
        block = Cut(shape, tuple(shares)).at(at)
        mine = block.take(numbers(shape)).reshape(-1)
        for first, last in ((0, len(mine)), (len(mine) // 3, len(mine) - 1), (1, 1)):
            for source in (Source(numbers(shape)), BoxSource(numbers(shape))):
                target = torch.full((max(0, last - first),), -1.0)
                block.read(source, "w", first, target, torch.float64)
                assert torch.equal(target, mine[first:last].float())
                assert all(asked <= chunk for asked in source.asked)
                if isinstance(source, BoxSource):
                    assert sum(source.asked) == len(target), "elements were read that are not wanted"


blocks = st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.sampled_from((1, 2)), st.sampled_from((1, 2, 3)), st.integers(1, 4)
)


@settings(max_examples=60)
@given(blocks)
def test_blocks_on_all_ranks_are_the_weight_once(drawn: tuple[int, int, int, int, int]) -> None:
    x, y, unit, parts, z = drawn
    shape = (5, unit * parts * 4)
    cut = Cut(shape, (share("x", 5, x), share("y", shape[1], y, unit, parts)))
    whole, seen = numbers(shape), torch.zeros(shape, dtype=torch.float64)
    gathered = torch.empty(shape, dtype=torch.float64)

    def fill(name: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        return whole.view(-1)[start:stop].to(dtype)

    for at in coordinates(x=x, y=y):
        block = cut.at(at)
        mine = block.take(whole).contiguous()
        assert mine.shape == block.shape and block.owned
        block.put(gathered, mine)
        block.put(seen, block.take(seen).contiguous() + 1)
        read = torch.full((mine.numel(),), -1.0, dtype=torch.float64)
        block.read(fill, "w", 0, read, torch.float64)
        assert torch.equal(read, mine.view(-1))
        _check_pieces(block, mine, whole, z)
    assert torch.equal(gathered, whole) and bool((seen == 1).all())


def _check_pieces(block: Block, mine: torch.Tensor, whole: torch.Tensor, z: int) -> None:
    """The shards over z hold exactly the logical boxes that they say."""
    layout = Layout.of([("w", block.logical, "plain")], z, {"w": block})
    (slot,) = layout.slots
    count = 0
    for index in range(z):
        first, last = slot.span(index)
        shard = torch.full((layout.size,), -1.0, dtype=torch.float64)
        shard[slot.shard_start : slot.shard_start + last - first] = mine.view(-1)[first:last]
        for piece in slot.pieces(index):
            box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
            assert torch.equal(piece.of(shard), whole[box])
            count += piece.numel
    assert count == mine.numel()
