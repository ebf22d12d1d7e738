"""Bytes that one rank hands to the network, by collective: the closed forms of wire's own algorithms.

They live beside the code that they predict; a test holds them equal to the metered bytes, exactly. `size` is the number
of ranks on the axis, `nbytes` the whole tensor in bytes, `index` the rank's index on the axis. Where a tensor does not
divide, ranks hand over different amounts: say `itemsize` (bytes per element) and `index` to have them exactly.
With a codec, put the payload's bytes for the tensor's; an all-reduce encodes part by part (`all_reduce_of_parts`).
Where each rank's part has a size of its own (`sizes` of a gather or a scatter), the forms `..._of_parts` take the bytes
of every part. The forms without parts do not enumerate the ranks: an axis of a forecast may have thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

MESSAGE_WORDS = 32
"""64-bit words of a message's header; its table of shapes makes it longer where that does not fit."""
MESSAGE_FIXED = 4
"""Of these, the ones before the table."""


def shares(count: int, size: int) -> list[int]:
    """`count` elements over `size` ranks, contiguous and as even as can be: the first ranks get one more."""
    return [share(count, size, index) for index in range(size)]


def share(count: int, size: int, index: int) -> int:
    """How many of `count` elements rank `index` of `size` gets in `shares`."""
    each, more = divmod(count, size)
    return each + (index < more)


def all_gather(size: int, nbytes: int) -> int:
    """Every rank sends its shard (nbytes / size) to every other. `nbytes` is the gathered tensor."""
    return nbytes // size * (size - 1)


def all_gather_of_parts(parts: Sequence[int], index: int) -> int:
    """The same of uneven shards, without padding: this rank's shard to every other. `parts`: bytes of each shard."""
    return (len(parts) - 1) * parts[index]


def reduce_scatter(size: int, nbytes: int) -> int:
    """Every rank sends every other its part: (size − 1) / size of the full tensor."""
    return nbytes // size * (size - 1)


def reduce_scatter_of_parts(parts: Sequence[int], index: int) -> int:
    """The same of uneven parts, without padding: every part but the own one. `parts`: bytes of each, own included."""
    return sum(parts) - parts[index]


def all_reduce(size: int, nbytes: int, itemsize: int = 1, index: int = 0) -> int:
    """An exchange and a gather: S − c + (size − 1) c, c this rank's share of S; 2 (size − 1) / size S if even."""
    count = nbytes // itemsize
    return (count + (size - 2) * share(count, size, index)) * itemsize


def all_reduce_of_parts(parts: Sequence[int], index: int) -> int:
    """The same from the bytes of each rank's part on the wire: a codec encodes every part on its own."""
    return sum(parts) - parts[index] + (len(parts) - 1) * parts[index]


def all_to_all(splits: Sequence[int], index: int) -> int:
    """All but the part that stays. `splits`: bytes for each rank."""
    return sum(splits) - splits[index]


def broadcast(size: int, nbytes: int, index: int = 0) -> int:
    """This rank's even share of (size − 1) S: backends forward along trees or rings, so only the total is known."""
    return share((size - 1) * nbytes, size, index)


def reduce(size: int, nbytes: int, index: int = 0, to: int = 0) -> int:
    """All of it, at every rank but the one that gets the sum: (size − 1) / size S on average."""
    return 0 if index == to or size == 1 else nbytes


def send(nbytes: int) -> int:
    """All of it, at the sender; a receive counts nothing."""
    return nbytes


def message(forms: Iterable[tuple[Sequence[int], int] | None]) -> int:
    """A header and the elements, at the sender. `forms`: shape and bytes per element of each tensor; None for none."""
    table = elements = 0
    for form in forms:
        table += 1 if form is None else 2 + len(form[0])
        elements += 0 if form is None else prod(form[0]) * form[1]
    return 8 * max(MESSAGE_WORDS, MESSAGE_FIXED + table) + elements


def barrier(size: int) -> int:
    """One byte to every other rank."""
    return size - 1
