"""What a message between two ranks looks like: it carries its own shapes, which may differ from one to the next.

First a header of 64-bit words: a mark, the key, how many tensors there are, how long their table is; then the table,
for each tensor the number of its dtype, how many dims it has, and these (or one word for None). The header has a
fixed length, so that its receive can be posted before anybody knows what comes; the rest of a table that does not fit
follows by itself. Then come the elements, all tensors of one dtype side by side; those of a lone tensor are not copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.wire.errors import Mismatch, UsageError
from fourfold.wire.formulas import MESSAGE_FIXED, MESSAGE_WORDS

MARK = 0x666F_7572_666F_6C01
"""Begins every header ("fourfol", version 1): what does not begin so is no message."""
ROOM = MESSAGE_WORDS - MESSAGE_FIXED
"""Words of the table that the header holds."""
NOTHING = -1
"""A table's word for None."""
MOST_DIMS = 64
"""More than any tensor has."""

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""By number. A new one is added at the end."""
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class Form(NamedTuple):
    """A tensor without its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Header(NamedTuple):
    """What a header says before its table is complete.

    Attributes:
        key: what the sender calls the message.
        tensors: how many it has.
        table: the part of the table that came with it.
        missing: words of the table that follow.
    """

    key: int
    tensors: int
    table: list[int]
    missing: int


def pack(key: int, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The flat parts of a message in the order in which they are sent: the header, the table's rest, the elements.

    Parts may share memory with `tensors`.

    Raises:
        UsageError: a tensor of a dtype that messages do not know.
    """
    table: list[int] = []
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor is None:
            table.append(NOTHING)
            continue
        if tensor.dtype not in _NUMBERS:
            raise UsageError(f"message {key}: no number for {tensor.dtype}; convert the tensor before it is sent")
        table += (_NUMBERS[tensor.dtype], tensor.dim(), *tensor.shape)
        if tensor.numel():
            groups.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
    words = [MARK, key, len(tensors), len(table), *table[:ROOM]]
    parts = [torch.tensor(words + [0] * (MESSAGE_WORDS - len(words)))]
    if len(table) > ROOM:
        parts.append(torch.tensor(table[ROOM:]))
    return parts + [group[0].contiguous() if len(group) == 1 else torch.cat(group) for group in groups.values()]


def read(header: Tensor) -> Header:
    """What the header's words say.

    Raises:
        Mismatch: it is no header.
    """
    mark, key, count, length, *table = header.tolist()
    if mark != MARK:
        raise Mismatch(
            f"found words that are no message of this version: the first is {mark:#x}, expected {MARK:#x}; "
            "run the same version on every rank, and nothing else on the axis under a message's tag"
        )
    if count < 0 or not count <= length <= count * (2 + MOST_DIMS):
        raise Mismatch(f"message {key}: a table of {length} words cannot describe {count} tensors")
    return Header(key, count, table[:length], max(0, length - ROOM))


def forms(header: Header, rest: Sequence[int] = ()) -> list[Form | None]:
    """What the table describes, once its rest has come.

    Raises:
        Mismatch: it describes no tensors.
    """
    words = iter((*header.table, *rest))
    try:
        found = [_form(words) for _ in range(header.tensors)]
    except (StopIteration, IndexError, ValueError) as error:
        raise Mismatch(f"message {header.key}: its table describes no tensors: {[*header.table, *rest]}") from error
    if next(words, None) is not None:
        raise Mismatch(f"message {header.key}: its table says more than {header.tensors} tensors")
    return found


def _form(words: Iterator[int]) -> Form | None:
    number = next(words)
    if number == NOTHING:
        return None
    dims = next(words)
    if number < 0 or not 0 <= dims <= MOST_DIMS:
        raise ValueError
    shape = tuple(islice(words, dims))
    if len(shape) < dims or min(shape, default=0) < 0:
        raise ValueError
    return Form(DTYPES[number], shape)


def buffers(found: Sequence[Form | None]) -> dict[torch.dtype, Tensor]:
    """An empty flat tensor for the elements of each dtype, in the order in which they come."""
    counts: dict[torch.dtype, int] = {}
    for form in found:
        if form is not None and (count := prod(form.shape)):
            counts[form.dtype] = counts.get(form.dtype, 0) + count
    return {dtype: torch.empty(count, dtype=dtype) for dtype, count in counts.items()}


def unpack(found: Sequence[Form | None], filled: dict[torch.dtype, Tensor]) -> tuple[Tensor | None, ...]:
    """The tensors, as views of what was filled."""
    starts = dict.fromkeys(filled, 0)
    tensors: list[Tensor | None] = []
    for form in found:
        if form is None:
            tensors.append(None)
        elif count := prod(form.shape):
            start = starts[form.dtype]
            starts[form.dtype] += count
            tensors.append(filled[form.dtype][start : start + count].view(form.shape))
        else:
            tensors.append(torch.empty(form.shape, dtype=form.dtype))
    return tuple(tensors)
