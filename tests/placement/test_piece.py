"""A flat range of a row-major tensor as boxes."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.placement.piece import boxes

shapes = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


@given(shapes, st.integers(0, 256), st.integers(0, 256))
def test_boxes_in_order_are_the_range(shape: tuple[int, ...], one: int, other: int) -> None:
    numel = prod(shape)
    first, last = sorted((min(one, numel), min(other, numel)))
    numbers = torch.arange(numel).view(shape)
    found = list(boxes(shape, first, last))
    parts = [numbers[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1) for box in found]
    assert torch.equal(torch.cat(parts), torch.arange(first, last))
    assert 1 <= len(found) <= 2 * len(shape) - 1


@pytest.mark.parametrize(
    ("shape", "first", "last", "expected"),
    [
        ((4, 3), 3, 9, [((1, 0), (2, 3))]),
        ((4, 3), 2, 7, [((0, 2), (1, 1)), ((1, 0), (1, 3)), ((2, 0), (1, 1))]),
        ((4, 3), 4, 5, [((1, 1), (1, 1))]),
        ((4, 3), 2, 4, [((0, 2), (1, 1)), ((1, 0), (1, 1))]),
        ((2, 2, 3), 3, 9, [((0, 1, 0), (1, 1, 3)), ((1, 0, 0), (1, 1, 3))]),
        ((4, 3), 12, 12, [((4, 0), (0, 3))]),
        ((), 0, 1, [((), ())]),
        ((), 1, 1, []),
    ],
    ids=str,
)
def test_by_hand(shape: tuple[int, ...], first: int, last: int, expected: list[object]) -> None:
    assert list(boxes(shape, first, last)) == expected
