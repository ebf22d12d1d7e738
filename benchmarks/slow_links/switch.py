"""The switch: a process that carries packets between TUN devices, each behind a link of given rate and delay.

    python switch.py RATE DELAY FD FD ...

RATE is in bytes/s, DELAY in seconds one way, the FDs are open TUN devices; device i has the address 10.77.0.(i + 1).
It writes "ready", and ends when its standard input closes: when whoever started it ends, however that happens.

Links are full duplex. A packet crosses its sender's link, then its receiver's (cut through: both at once, if both are
free), and arrives DELAY later. Each direction of a link carries one packet at a time and shares itself evenly between
the connections that want it, as Linux's own queues do before a network card. The switch drops nothing, and the devices
drop only what it does not fetch in time (`SlowLinks.dropped` counts that).

Eight links that carry 200 Mbit/s both ways at once take half a core, with packets of 16,000 bytes.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LARGEST = 65535
PRIORITY = 10
"""Among real-time processes, where that is allowed: above ranks that are started under `chrt --rr 1`."""
ETHERNET = 38
"""Bytes that Ethernet adds to a packet: preamble, addresses, type, checksum, gap."""


@dataclass
class Link:
    """One direction of a link: what waits for it, in the order of self-clocked fair queueing (Golestani, 1994).

    A packet's tag is its connection's last one, or that of the packet on the link if this is later, plus its size; the
    smallest tag goes first.

    Attributes:
        waiting: (tag, a running number, bytes on the wire, the packet), a heap.
        busy: a packet is on the link.
    """

    waiting: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    busy: bool = False
    _tag: float = 0.0
    _last: dict[bytes, float] = field(default_factory=dict)

    def put(self, number: int, size: int, packet: bytes) -> None:
        """`packet` waits."""
        connection = packet[12:24]  # both addresses, both ports
        tag = self._last[connection] = max(self._tag, self._last.get(connection, 0.0)) + size
        heapq.heappush(self.waiting, (tag, number, size, packet))

    def take(self) -> tuple[int, bytes]:
        """The next packet, with its bytes on the wire."""
        self._tag, _, size, packet = heapq.heappop(self.waiting)
        return size, packet


class Switch:
    """Links by number of the device; times are seconds of the monotonic clock, and never wait for this process."""

    def __init__(self, devices: Sequence[int], rate: float, delay: float) -> None:
        self.devices, self.rate, self.delay = list(devices), rate, delay
        self.sending, self.receiving = [[Link() for _ in self.devices] for _ in range(2)]
        self._due: list[tuple[float, int, Callable[..., None], int, bytes]] = []
        self._number = 0

    def run(self, until: int) -> None:
        """Carry packets until there is something to read from `until`, or it is closed."""
        numbers = {device: number for number, device in enumerate(self.devices)}
        while True:
            patience = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            readable = select.select([until, *self.devices], [], [], patience)[0]
            if until in readable:
                return
            self.advance(time.monotonic())
            for device in readable:
                self._read(numbers[device], device)

    def advance(self, now: float) -> None:
        """Do what is due."""
        while self._due and self._due[0][0] <= now:
            at, _, action, number, packet = heapq.heappop(self._due)
            action(at, number, packet)

    def sent(self, source: int, packet: bytes, now: float) -> None:
        """A packet comes to the link of its sender; what is not for a device of ours (multicasts) goes nowhere."""
        if packet[0] >> 4 == 4 and 0 < packet[19] <= len(self.devices):
            self._number += 1
            self.sending[source].put(self._number, len(packet) + ETHERNET, packet)
            if not self.sending[source].busy:
                self._send(now, source)

    def _read(self, source: int, device: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.sent(source, os.read(device, LARGEST), time.monotonic())

    def _send(self, at: float, source: int, _: bytes = b"") -> None:
        """The link of `source` is free: it takes its next packet, which comes to its receiver's link at once."""
        link = self.sending[source]
        link.busy = bool(link.waiting)
        if not link.busy:
            return
        size, packet = link.take()
        self._at(at + size / self.rate, self._send, source)
        target = packet[19] - 1
        self._number += 1
        self.receiving[target].put(self._number, size, packet)
        if not self.receiving[target].busy:
            self._receive(at, target)

    def _receive(self, at: float, target: int, _: bytes = b"") -> None:
        """The link of `target` is free."""
        link = self.receiving[target]
        link.busy = bool(link.waiting)
        if not link.busy:
            return
        size, packet = link.take()
        left = at + size / self.rate
        self._at(left, self._receive, target)
        self._at(left + self.delay, self._arrive, target, packet)

    def _arrive(self, _: float, target: int, packet: bytes) -> None:
        os.write(self.devices[target], packet)

    def _at(self, at: float, action: Callable[..., None], number: int, packet: bytes = b"") -> None:
        self._number += 1
        heapq.heappush(self._due, (at, self._number, action, number, packet))


def main() -> None:
    """Read the command line, carry until standard input closes."""
    rate, delay, *devices = sys.argv[1:]
    with contextlib.suppress(PermissionError):  # a network does not wait until those who use it have computed
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    switch = Switch([int(device) for device in devices], float(rate), float(delay))
    print("ready", flush=True)
    switch.run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
