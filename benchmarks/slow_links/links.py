"""Ranks on slow links: so many network namespaces, one full-duplex link each, and the switch between them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from slow_links import gauge, namespace

SWITCH = Path(__file__).with_name("switch.py")
MISSING = {
    errno.EPERM: "the right to make network namespaces; run as root, or under `unshare --user --map-root-user --net`",
    errno.EACCES: "the right to open /dev/net/tun; run as root",
    errno.ENOENT: "TUN devices (/dev/net/tun); `modprobe tun` provides them on most kernels",
    errno.ENOSYS: "network namespaces in this kernel",
    errno.EINVAL: "network namespaces in this kernel",
}


class SlowLinksError(RuntimeError):
    """Slow links cannot be had here, or are not what was asked for: says what is missing or what was measured."""


class SlowLinks:
    """`count` namespaces on links of `rate` bit/s each way; a context manager.

    A process belongs to namespace `index` once it has called `enter(index)`; its device is called `device` and has the
    address `addresses[index]`. Nothing outlives the context and the processes that entered, however they end: the
    switch ends with this process, and the kernel takes namespaces and devices away when nobody holds them.

    Args:
        count: of namespaces, at most 250.
        rate: bit/s of a link, in either direction at once.
        round_trip: seconds that a message and its answer take at least, between any two.

    Raises:
        SlowLinksError: on entering, where there is no Linux, no right or no TUN device.
    """

    device = namespace.DEVICE

    def __init__(self, count: int, rate: float, round_trip: float = 0.0) -> None:
        if not 2 <= count <= 250 or rate <= 0 or round_trip < 0:
            raise ValueError(
                "slow links: expected 2 to 250 namespaces, a rate above zero and a round trip of at least zero, "
                f"found {count}, {rate:g} bit/s, {round_trip:g} s"
            )
        self.count, self.rate, self.round_trip = count, rate, round_trip
        self.addresses = [f"10.77.0.{index + 1}" for index in range(count)]
        self._spaces: list[namespace.Namespace] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if sys.platform != "linux":
            raise SlowLinksError(f"slow links need Linux, found {sys.platform}")
        with ExitStack() as stack:
            try:
                for address in self.addresses:
                    space = namespace.create(address)
                    stack.callback(space.close)
                    self._spaces.append(space)
            except OSError as error:
                raise SlowLinksError(f"slow links need {MISSING.get(error.errno or 0, 'more')} ({error})") from error
            self._switch = self._started(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        self._spaces.clear()

    def _started(self, stack: ExitStack) -> subprocess.Popen[str]:
        devices = [space.device for space in self._spaces]
        command = [sys.executable, "-I", "-S", str(SWITCH), str(self.rate / 8), str(self.round_trip / 2)]
        switch = subprocess.Popen(
            [*command, *map(str, devices)],
            pass_fds=devices,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(switch)  # closes its standard input, at which it ends, and waits for it
        assert switch.stdout is not None
        if switch.stdout.readline() != "ready\n":
            raise SlowLinksError(f"the switch did not start: it ended with {switch.wait()}")
        return switch

    def enter(self, index: int) -> None:
        """Put the calling process (one thread so far) into namespace `index`; it dies when its parent does.

        Call it in a child: first thing of a forked one, or as `preexec_fn`.
        """
        namespace.enter(self._spaces[index].handle)
        namespace.die_with_parent(signal.SIGKILL)
        os.environ["GLOO_SOCKET_IFNAME"] = self.device

    def entering(self, index: int) -> Callable[[], None]:
        """`enter(index)` as the `preexec_fn` of a subprocess."""
        return lambda: self.enter(index)

    def processor_seconds(self) -> float:
        """CPU time that the switch has taken: what the network costs the machine that plays it."""
        times = psutil.Process(self._switch.pid).cpu_times()
        return times.user + times.system

    def dropped(self) -> int:
        """Packets lost so far, because the switch was too late to fetch them: none, if the machine is not overrun."""
        return sum(namespace.dropped(space.handle) for space in self._spaces)

    def measured(self) -> gauge.Reading:
        """What the links really do. Takes some five seconds; nobody else may use them meanwhile.

        Raises:
            SlowLinksError: goodput is further than 10 % from the rate, or a round trip than 2 ms from what was asked.
        """
        reading = gauge.measure([space.handle for space in self._spaces], self.addresses)
        wrong = reading.wrong(self.rate, self.round_trip)
        if wrong:
            raise SlowLinksError(f"the links are not what was asked for: {wrong} ({reading}); is the machine too busy?")
        return reading
