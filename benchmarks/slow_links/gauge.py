"""What slow links do, measured before anything is claimed about what runs on them."""

from __future__ import annotations

import selectors
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from slow_links import namespace

GOODPUT_WITHIN, ROUND_TRIP_WITHIN = 0.10, 2e-3
"""Of the rate, a share; of the round trip, seconds."""
PINGS, WARM, SECONDS = 40, 2.0, 2.0
CHUNK = bytes(1 << 17)


@dataclass(frozen=True)
class Reading:
    """Goodput is bit/s of what applications hand to TCP, while every link carries it both ways at once.

    Attributes:
        slowest, fastest: goodput of the links.
        round_trip: median seconds of a byte and its answer, on idle links.
    """

    slowest: float
    fastest: float
    round_trip: float

    def __str__(self) -> str:
        rates = f"{self.slowest / 1e6:.1f} to {self.fastest / 1e6:.1f} Mbit/s"
        return f"goodput {rates} a link, round trip {self.round_trip * 1e3:.2f} ms"

    def wrong(self, rate: float, round_trip: float) -> str:
        """What is further from what was asked for than it may be; empty if nothing is."""
        for found in (self.slowest, self.fastest):
            if abs(found / rate - 1) > GOODPUT_WITHIN:
                return f"expected {rate / 1e6:g} Mbit/s within {GOODPUT_WITHIN:.0%}, found {found / 1e6:.1f}"
        if abs(self.round_trip - round_trip) > ROUND_TRIP_WITHIN:
            return (
                f"expected a round trip of {round_trip * 1e3:g} ms within {ROUND_TRIP_WITHIN * 1e3:g} ms, "
                f"found {self.round_trip * 1e3:.2f}"
            )
        return ""


def measure(handles: Sequence[int], addresses: Sequence[str]) -> Reading:
    """Round trips between neighbours, then a stream from each namespace to the next, all at once.

    Args:
        handles: open on the namespaces.
        addresses: of their devices.
    """
    ring = [(index, (index + 1) % len(handles)) for index in range(len(handles))]
    with ExitStack() as stack:
        pairs = [stack.enter_context(_connection(handles, addresses, *ends)) for ends in ring]
        round_trip = statistics.median(_ping(*pair) for _ in range(PINGS // len(pairs) + 1) for pair in pairs)
        rates = _streams(pairs)
    return Reading(min(rates), max(rates), round_trip)


@contextmanager
def _connection(
    handles: Sequence[int], addresses: Sequence[str], source: int, target: int
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection, which belong to the namespaces in which they were made."""
    with ExitStack() as stack:
        with namespace.inside(handles[target]):
            listener = stack.enter_context(socket.create_server((addresses[target], 0)))
        with namespace.inside(handles[source]):
            near = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
        far = stack.enter_context(listener.accept()[0])
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield near, far


def _ping(near: socket.socket, far: socket.socket) -> float:
    began = time.perf_counter()
    for source, target in ((near, far), (far, near)):
        source.send(b"?")
        target.recv(1)
    return time.perf_counter() - began


def _streams(pairs: Sequence[tuple[socket.socket, socket.socket]]) -> list[float]:
    """Bit/s that arrive at each far end, once the streams have had time to find their rate."""
    received = [0] * len(pairs)
    with selectors.DefaultSelector() as selector:
        for index, (near, far) in enumerate(pairs):
            near.setblocking(False)
            far.setblocking(False)
            selector.register(near, selectors.EVENT_WRITE)
            selector.register(far, selectors.EVENT_READ, index)
        _carry(selector, received, WARM)
        before = received.copy()
        seconds = _carry(selector, received, SECONDS)
    return [8 * (after - earlier) / seconds for earlier, after in zip(before, received, strict=True)]


def _carry(selector: selectors.BaseSelector, received: list[int], seconds: float) -> float:
    """Write and read wherever it does not block, for so long; returns how long it was."""
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        for key, _ in selector.select(timeout=seconds - spent):
            end = key.fileobj
            assert isinstance(end, socket.socket)
            if key.data is None:
                end.send(CHUNK)
            else:
                received[key.data] += len(end.recv(len(CHUNK)))
    return spent
