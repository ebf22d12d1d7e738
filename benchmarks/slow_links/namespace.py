"""Network namespaces with one TUN device each, made by system calls: no name, no file, nothing to remove afterwards.

A namespace and its device live as long as a process is in it or a file descriptor is open on it, and no longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NEW_NETWORK = 0x40000000
DEVICE, MTU = "link", 16_000
"""Name of the device in every namespace, and bytes of its largest packet. With 9,000 the switch takes a third more CPU;
with 64,000 eight connections take turns so coarsely that a rank that begins an exchange 2 ms late ends it 15 late."""
QUEUE = 10_000
"""Packets that a device holds for a switch that is late: more than TCP's windows let eight ranks send. Who is not root
on this machine itself has 500."""
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
"""Where the namespace of the thread that opens it says how its TCP finds its rate. Every kernel lets it choose Reno:
links that drop nothing carry 98 % of their rate then, and 85 % under BBR, which some machines have as their own."""

_libc = ctypes.CDLL(None, use_errno=True)

_TUNSETIFF = 0x400454CA
_TUN, _NO_INFO = 0x0001, 0x1000
_SET_FLAGS, _SET_ADDRESS, _SET_MASK, _SET_MTU, _SET_QUEUE = 0x8914, 0x8916, 0x891C, 0x8922, 0x8943
_UP = 0x1
_PARENT_DEATH_SIGNAL = 1


@dataclass(frozen=True)
class Namespace:
    """A network namespace, and the other end of its device.

    Attributes:
        handle: open on the namespace; `enter` takes it.
        device: packets written here arrive in the namespace, packets that leave it are read here; never blocks.
        address: of the device, IPv4.
    """

    handle: int
    device: int
    address: str

    def close(self) -> None:
        """Let go of both."""
        os.close(self.handle)
        os.close(self.device)


def enter(handle: int) -> None:
    """This thread is in that namespace from here on.

    Raises:
        OSError: EPERM, without the right to administer it.
    """
    _checked(_libc.setns(handle, NEW_NETWORK), "setns")


@contextlib.contextmanager
def inside(handle: int) -> Iterator[None]:
    """This thread is in that namespace for as long as the context lasts; sockets made meanwhile stay there."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(handle)
        try:
            yield
        finally:
            enter(home)
    finally:
        os.close(home)


def create(address: str) -> Namespace:
    """A new namespace, its loopback up, with a device of this address in a network of 256.

    Raises:
        OSError: EPERM, without the right to make one; ENOENT, where the kernel has no TUN devices.
    """
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _checked(_libc.unshare(NEW_NETWORK), "unshare")
        try:
            handle = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            try:
                Path(CONGESTION).write_text("reno")
                return Namespace(handle, _device(address), address)
            except BaseException:
                os.close(handle)
                raise
        finally:
            enter(home)
    finally:
        os.close(home)


def dropped(handle: int) -> int:
    """Packets that the device of a namespace could not hold so far."""
    with inside(handle):
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (counts,) = [line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{DEVICE}:")]
    return int(counts[3]) + int(counts[11])


def die_with_parent(signal: int) -> None:
    """This process gets `signal` when the thread that started it ends."""
    _checked(_libc.prctl(_PARENT_DEATH_SIGNAL, signal), "prctl")


def _device(address: str) -> int:
    """Open a TUN device of the namespace that this thread is in, and raise it and the loopback."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        name = DEVICE.encode()
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name, _TUN | _NO_INFO))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))
            fcntl.ioctl(control, _SET_MTU, struct.pack("16si20x", name, MTU))
            with contextlib.suppress(PermissionError):
                fcntl.ioctl(control, _SET_QUEUE, struct.pack("16si20x", name, QUEUE))
            for request, value in ((_SET_ADDRESS, address), (_SET_MASK, "255.255.255.0")):
                where = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(control, request, struct.pack("16s16s8x", name, where))
            fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH22x", name, _UP))
    except BaseException:
        os.close(device)
        raise
    return device


def _checked(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
