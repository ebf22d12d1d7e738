"""Recorded spans as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fourfold.ledger import Ledger, Span

Event = dict[str, Any]
FIRST_LANES = ("step", "compute", "data")
"""Lanes that come first, in this order; the others follow by name."""


def write(path: Path, ledgers: Mapping[int, Ledger], axes: Mapping[str, int]) -> int:
    """Write the trace, gzipped; returns how many spans it holds. Equal ledgers give equal bytes."""
    events = list(trace(ledgers, axes))
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return sum(event["ph"] == "X" for event in events)


def trace(ledgers: Mapping[int, Ledger], axes: Mapping[str, int]) -> Iterator[Event]:
    """Events of all ranks: a process a rank, a thread a lane, arrows from a collective's first rank to its others.

    Args:
        ledgers: by rank.
        axes: sizes of the mesh axes, fastest first: they say who takes part in a collective.
    """
    spans = [span for ledger in ledgers.values() for span in ledger.spans]
    if not spans:
        return
    begin = min(span.start for span in spans)
    for rank in sorted(ledgers):
        yield from _rank(rank, ledgers[rank], begin)
    yield from _flows(ledgers, axes, begin)


def _rank(rank: int, ledger: Ledger, begin: int) -> Iterator[Event]:
    threads = _threads(ledger)
    yield _meta("process_name", rank, 0, name=f"rank {rank}")
    yield _meta("process_sort_index", rank, 0, sort_index=rank)
    for lane, thread in threads.items():
        yield _meta("thread_name", rank, thread, name=lane)
        yield _meta("thread_sort_index", rank, thread, sort_index=thread)
    sent: defaultdict[str, int] = defaultdict(int)
    for span in sorted(ledger.spans, key=lambda span: span.start):
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.lane,
            "pid": rank,
            "tid": threads[span.lane],
            "ts": (span.start - begin) / 1e3,
            "dur": (span.end - span.start) / 1e3,
            "args": span.args,
        }
        if "bytes" in span.args:
            sent[span.lane] += span.args["bytes"]
            moment = {"ph": "C", "name": f"bytes sent, {span.lane}", "pid": rank, "ts": (span.end - begin) / 1e3}
            yield moment | {"args": {"bytes": sent[span.lane]}}


def _threads(ledger: Ledger) -> dict[str, int]:
    lanes = {span.lane for span in ledger.spans}
    ordered = [*(lane for lane in FIRST_LANES if lane in lanes), *sorted(lanes - set(FIRST_LANES))]
    return {lane: number for number, lane in enumerate(ordered)}


def _meta(what: str, rank: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _flows(ledgers: Mapping[int, Ledger], axes: Mapping[str, int], begin: int) -> Iterator[Event]:
    """The n-th collective of a lane is the same collective on every rank of the group."""
    identity = 0
    for partners in _collectives(ledgers, axes).values():
        (rank, thread, span), *others = partners
        for other, their_thread, theirs in others:
            identity += 1
            common = {"name": span.name, "cat": span.lane, "id": identity}
            yield {"ph": "s", "pid": rank, "tid": thread, "ts": (span.start - begin) / 1e3, **common}
            yield {"ph": "f", "bp": "e", "pid": other, "tid": their_thread, "ts": (theirs.end - begin) / 1e3, **common}


def _collectives(
    ledgers: Mapping[int, Ledger], axes: Mapping[str, int]
) -> dict[tuple[Any, ...], list[tuple[int, int, Span]]]:
    found: defaultdict[tuple[Any, ...], list[tuple[int, int, Span]]] = defaultdict(list)
    for rank in sorted(ledgers):
        threads = _threads(ledgers[rank])
        counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        for span in sorted(ledgers[rank].spans, key=lambda span: span.start):
            if span.lane.startswith("wire:"):
                number = counts[span.lane, span.name]
                counts[span.lane, span.name] += 1
                group = _group(rank, span.lane.removeprefix("wire:"), axes)
                found[span.lane, span.name, number, group].append((rank, threads[span.lane], span))
    return found


def _group(rank: int, lane: str, axes: Mapping[str, int]) -> tuple[int, ...]:
    """What is the same for all ranks that take part in the lane "z+data", or in a part of an axis, "y/4".

    Their coordinates on the axes across; and which part of the axis it is.
    """
    along, _, part = lane.partition("/")
    across, place, stride = [], 0, 1
    for name, size in axes.items():
        rank, index = divmod(rank, size)
        if name in along.split("+"):
            place, stride = place + index * stride, stride * size
        else:
            across.append(index)
    return (*across, place // int(part)) if part else tuple(across)
