"""What a message looks like on the wire: its parts, its bytes, and what is refused as no message."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.wire import formulas, message


def test_the_formula_by_hand() -> None:
    # A header of 256 bytes holds 28 words of a table: two words a tensor and one a dim, one word a None.
    assert formulas.message([]) == 256
    assert formulas.message([((2, 3), 4), None, ((0, 5), 8)]) == 256 + 24
    assert formulas.message([((1,), 8)] * 9) == 256 + 72
    assert formulas.message([((1,), 8)] * 10) == 256 + 16 + 80


def test_a_lone_tensor_is_not_copied_and_several_of_a_dtype_travel_together() -> None:
    one, two = torch.ones(3, 4), torch.ones(5, dtype=torch.float64)
    _, first, second = message.pack(1, [one, two])
    assert (first.data_ptr(), second.data_ptr()) == (one.data_ptr(), two.data_ptr())
    assert [part.numel() for part in message.pack(1, [one, two, one.t(), None])] == [32, 24, 5]
    assert [part.numel() for part in message.pack(1, [one[:0], None])] == [32]


def test_every_dtype_and_a_table_longer_than_the_header_come_back() -> None:
    tensors = [torch.arange(place).to(dtype).view(1, -1) for place, dtype in enumerate(message.DTYPES)]
    words, rest, *elements = message.pack(-3, [*tensors, None])
    header = message.read(words)
    forms = message.forms(header, rest.tolist())
    filled = message.buffers(forms)
    for mine, theirs in zip(filled.values(), elements, strict=True):
        mine.copy_(theirs)
    found = message.unpack(forms, filled)
    assert (header.key, header.missing, found[-1]) == (-3, rest.numel(), None)
    for got, want in zip(found, tensors, strict=False):
        assert got is not None and got.dtype == want.dtype and got.shape == want.shape
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def header(*words: int) -> Tensor:
    return torch.tensor([message.MARK, *words] + [0] * (31 - len(words)))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((5, -1, 0), "a table of 0 words cannot describe -1 tensors"),
        ((5, 2, 1, -1), "a table of 1 words cannot describe 2 tensors"),
        ((5, 1, 3, 99, 1, 4), "its table describes no tensors"),
        ((5, 1, 3, -2, 1, 4), "its table describes no tensors"),
        ((5, 1, 3, 0, 1, -4), "its table describes no tensors"),
        ((5, 1, 3, 0, 9, 1), "its table describes no tensors"),
        ((5, 1, 3, 0, 0, 1), "its table says more than 1 tensors"),
    ],
)
def test_a_header_that_cannot_be_is_refused(words: tuple[int, ...], says: str) -> None:
    with pytest.raises(wire.Mismatch, match=says):
        message.forms(message.read(header(*words)))
