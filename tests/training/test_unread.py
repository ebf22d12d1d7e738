"""A tensor that lies in parts is rearranged as torch rearranges a real one, and boxes of it have the same values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.training.unread import Brick, Unread

REARRANGED: dict[str, Callable[[Any, Any], Any]] = {
    "side by side": lambda a, b: torch.cat([a, b], dim=1),
    "below": lambda a, b: torch.cat([b, a, b]),
    "stacked": lambda a, b: torch.stack([a, b], dim=0),
    "stacked inside": lambda a, b: torch.stack([a, b], dim=2),
    "split": lambda a, b: torch.split(torch.cat([a, b]), [5, 3], dim=0)[0],
    "in chunks": lambda a, b: torch.chunk(torch.cat([a, b], dim=1), 3, dim=1)[1].contiguous(),
    "uneven chunks": lambda a, b: torch.chunk(a, 3, dim=0)[-1],
    "transposed": lambda a, b: torch.transpose(torch.cat([a, b]), 0, 1),
    "experts": lambda a, b: torch.cat([torch.stack([a, b], dim=0), torch.stack([b, a], dim=0)], dim=1),
    "experts, transposed": lambda a, b: torch.transpose(torch.stack([a, b], dim=0), dim0=1, dim1=2).contiguous(),
}


def boxes(tensor: Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Many boxes: every pair of (offset, size) of small steps, empty ones included."""
    along = [[(0, size), (0, size // 2), (size // 2, size - size // 2), (size - 1, 1)] for size in tensor.shape]
    return [tuple(zip(*chosen, strict=True)) for chosen in product(*along)]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("name", REARRANGED)
def test_it_is_rearranged_as_a_tensor(name: str) -> None:
    a, b = torch.arange(24.0).view(4, 6), torch.arange(100.0, 124.0).view(4, 6)
    wanted = REARRANGED[name](a, b)
    found = REARRANGED[name](Unread.of(a), Unread.of(b))
    assert isinstance(found, Unread) and found.shape == wanted.shape and found.size(0) == wanted.size(0)
    for offsets, sizes in boxes(wanted):
        box = wanted[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert torch.equal(found.box(offsets, sizes, torch.float64), box.double())


def test_what_it_cannot_do_is_an_error_not_a_wrong_value() -> None:
    with pytest.raises(TypeError):
        torch.flip(Unread.of(torch.zeros(2, 2)), [0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(AttributeError):
        Unread.of(torch.zeros(2, 2)).view(4)  # pyright: ignore[reportAttributeAccessIssue]


def test_parts_that_leave_a_hole_are_refused() -> None:
    with pytest.raises(ValueError, match="parts that fill a tensor of shape .2, 3., found 4"):
        Unread((2, 3), [Brick((0, 0), torch.zeros(2, 2))])


def test_a_scalar() -> None:
    assert Unread.of(torch.tensor(3.0)).box((), (), torch.int64).item() == 3
