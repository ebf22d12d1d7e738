"""FLUX's overlap: a product and its collective in tiles, each of which waits for its own chunk alone.

FLUX does it inside one kernel. Here a product is cut into chunks of rows that travel while others are multiplied
(`placement.tensor.rows`). What every rank does, and in which order, is recorded as the code runs, and replayed on a
clock: links and processors of given speeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fourfold.placement.tensor.rows import gather_multiply, multiply_scatter
from fourfold.recipes._claim import Claim
from fourfold.wire import Axis, Mesh, Work, World
from fourfold.wire.threads import launch

RANKS, ROWS, K, N = 4, 32, 24, 40
"""Rows of each rank."""

CHUNKS = (4, 8)
SPEEDS = {"2 : 1": 2.0, "1 : 1": 1.0, "1 : 2": 0.5}
"""Seconds of all multiplications by those of all messages."""

FORMS = ("gather + product", "product + scatter")


def claim() -> Claim:
    """Chang et al. 2024, section 3.

    A tile is a chunk: what one signal lets go. How much of a GPU's time this hides is no matter of this claim; the
    clock here has no cost of starting a kernel or a message.
    """
    predicted: dict[str, float] = {}
    for form in FORMS:
        for chunks in CHUNKS:
            about = f"{form}, {chunks} chunks"
            predicted[f"{about}: differs from the unfused"] = 0.0
            predicted[f"{about}: tiles ahead of their signal"] = 0.0
            predicted[f"{about}: ranks that begin elsewhere"] = RANKS
            for speed in SPEEDS:
                predicted[f"{about}, compute : send {speed}: beyond max + a tile"] = 0.0
    return Claim(
        system="FLUX",
        paper="Chang et al. 2024, arXiv 2406.06858",
        statement="a product in tiles equals the unfused one; no tile reads a chunk before its signal; each rank "
        "begins elsewhere; on a clock it takes at most the longer of computing and sending, plus one tile",
        predicted=predicted,
        measure=lambda: _figures(tiled=True),
        control=lambda: _figures(tiled=False),
        off="in one piece: the collective, then the product (or the other way round)",
        tolerance=1e-12,
    )


class Event(NamedTuple):
    """Something that a rank did.

    Attributes:
        what: "send" (a collective is begun), "signal" (a rank has seen its end), "tile" (a multiplication).
        chunk: which collective; of a tile, the one that brings what it reads, or takes what it gives; -1: none.
        amount: of work: elements that the rank hands out, or rows that are multiplied.
        rank: of a tile, whose rows these are.
    """

    what: str
    chunk: int
    amount: int
    rank: int = -1


def _figures(*, tiled: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    for form in FORMS:
        for chunks in CHUNKS:
            about = f"{form}, {chunks} chunks"
            ranks = launch(RANKS, _run, form, chunks if tiled else 1)
            events = [rank[1] for rank in ranks]
            figures[f"{about}: differs from the unfused"] = max(rank[0] for rank in ranks)
            figures[f"{about}: tiles ahead of their signal"] = sum(map(ahead, events))
            figures[f"{about}: ranks that begin elsewhere"] = len({_first(one) for one in events})
            for speed, ratio in SPEEDS.items():
                bound = max(ratio, 1.0) * (1 + 1 / chunks)
                late = elapsed(events, multiplying=ratio, sending=1.0) - bound
                figures[f"{about}, compute : send {speed}: beyond max + a tile"] = max(0.0, late)
    return figures


def _first(events: Sequence[Event]) -> int:
    return next(event.rank for event in events if event.what == "tile")


def ahead(events: Sequence[Event]) -> int:
    """Tiles that read a chunk before its end was seen, or that were computed when their chunk had left."""
    seen: set[tuple[str, int]] = set()
    count = 0
    for event in events:
        if event.what == "tile" and event.chunk >= 0:
            gathers = ("send", event.chunk) in seen
            count += gathers and ("signal", event.chunk) not in seen
        seen.add((event.what, event.chunk))
    return count


# ---- what the code does


def _run(world: World, form: str, chunks: int) -> tuple[float, list[Event]]:
    """How far the result is from that in one piece, and what this rank did."""
    axis = Mesh(world, {"y": RANKS})["y"]
    generator = torch.Generator().manual_seed(world.rank)
    weight = torch.randn(K, N, dtype=torch.float64, generator=generator)
    count = ROWS if form == FORMS[0] else RANKS * ROWS
    rows = torch.randn(count, K, dtype=torch.float64, generator=generator)
    watched = Watched(axis)
    found = _product(form, rows, weight, cast(Axis, watched), chunks, watched.events)
    unfused = _product(form, rows, weight, axis, 1, [])
    return float((found - unfused).abs().max() / unfused.abs().max()), watched.events


def _product(form: str, rows: Tensor, weight: Tensor, axis: Axis, chunks: int, events: list[Event]) -> Tensor:
    """One of the two forms, which notes its tiles."""
    parts = [ROWS] * RANKS
    gathers = form == FORMS[0]
    out = torch.empty(RANKS * ROWS, N, dtype=torch.float64)

    def tile(read: Tensor, given: Tensor) -> None:
        if isinstance(axis, Watched):
            place = (given.data_ptr() - out.data_ptr()) if gathers else (read.data_ptr() - rows.data_ptr())
            width = N if gathers else K
            first = place // (width * read.element_size())
            chunk = axis.chunk_of(read) if gathers else axis.chunk_of(given, new=True)
            events.append(Event("tile", chunk, len(read), first // ROWS))
        torch.mm(read, weight, out=given)

    if gathers:
        gather_multiply(rows, out, tile, axis, parts, "activation", chunks)
        return out
    return multiply_scatter(rows, N, tile, axis, parts, "activation", chunks)


class Watched:
    """An axis whose collectives are noted; chunks are known by the memory that they lie in."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.size, self.index = axis, axis.size, axis.index
        self.events: list[Event] = []
        self._chunks: dict[int, int] = {}

    def chunk_of(self, tensor: Tensor, *, new: bool = False) -> int:
        """Which collective moves the tensor's memory; -1: none."""
        key = tensor.untyped_storage().data_ptr()
        if new:
            self._chunks.setdefault(key, len(self._chunks))
        return self._chunks.get(key, -1)

    def all_gather(self, out: Tensor, shard: Tensor, kind: str, **options: Any) -> Work:
        """As `Axis`."""
        return self._noted(out, self.axis.all_gather(out, shard, kind, **options))

    def reduce_scatter(self, out: Tensor, full: Tensor, kind: str, **options: Any) -> Work:
        """As `Axis`."""
        return self._noted(full, self.axis.reduce_scatter(out, full, kind, **options))

    def _noted(self, whole: Tensor, work: Work) -> Work:
        chunk = self.chunk_of(whole, new=True)
        self.events.append(Event("send", chunk, whole.numel()))
        return cast(Work, Signal(work, self.events, chunk))


class Signal:
    """A work whose end is noted when the rank has seen it."""

    def __init__(self, work: Work, events: list[Event], chunk: int) -> None:
        self._work, self._events, self._chunk = work, events, chunk

    def wait(self) -> None:
        """As `Work`."""
        self._work.wait()
        self._events.append(Event("signal", self._chunk, 0))


# ---- the same on a clock


def elapsed(ranks: Sequence[Sequence[Event]], *, multiplying: float, sending: float) -> float:
    """Seconds until the last rank has done all of its events, in their order.

    A collective begins when all ranks have come to it and the link is free of the one before.

    Args:
        ranks: every rank's events.
        multiplying: seconds that a rank's tiles take, all together.
        sending: seconds that all collectives take, one after the other.
    """
    ends = _ends(ranks, multiplying, sending)
    return max(_clock(events, multiplying, ends)[0] for events in ranks)


def _ends(ranks: Sequence[Sequence[Event]], multiplying: float, sending: float) -> dict[int, float]:
    """When every collective ends, in the order in which they are begun."""
    sends = [event for event in ranks[0] if event.what == "send"]
    ends: dict[int, float] = {}
    free = 0.0
    for send in sends:
        begun = max(_clock(events, multiplying, ends)[1][send.chunk] for events in ranks)
        free = ends[send.chunk] = max(begun, free) + sending * send.amount / _total(sends)
    return ends


def _clock(events: Sequence[Event], multiplying: float, ends: Mapping[int, float]) -> tuple[float, dict[int, float]]:
    """When one rank is done, and when it comes to each collective, as far as the ends of these are known."""
    now, begun = 0.0, dict[int, float]()
    tiles = _total([event for event in events if event.what == "tile"])
    for event in events:
        if event.what == "send":
            begun[event.chunk] = now
        elif event.what == "tile":
            now += multiplying * event.amount / tiles
        elif event.chunk in ends:
            now = max(now, ends[event.chunk])
        else:
            break
    return now, begun


def _total(events: Sequence[Event]) -> int:
    return sum(event.amount for event in events)
