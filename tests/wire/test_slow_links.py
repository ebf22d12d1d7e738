"""Slow links: the switch's arithmetic in a time of its own, and real namespaces behind it."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from slow_links import Reading, SlowLinks, SlowLinksError, gauge, namespace
from slow_links.switch import ETHERNET, Switch

RATE, DELAY = 1000.0, 0.5  # bytes/s and seconds one way


def packet(source: int, target: int, size: int, port: int = 1) -> bytes:
    """An IPv4 packet that takes `size` bytes on the wire."""
    addresses = bytes([10, 77, 0, source + 1, 10, 77, 0, target + 1])
    headers = struct.pack("!B11x8sHH", 0x45, addresses, port, port)
    return headers + bytes(size - ETHERNET - len(headers))


class Played:
    """A switch between devices that are pipes, so that what arrives can be read at any time of the play."""

    def __init__(self, count: int) -> None:
        self.ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
        self.switch = Switch([theirs.fileno() for _, theirs in self.ends], RATE, DELAY)
        for ours, _ in self.ends:
            ours.setblocking(False)

    def close(self) -> None:
        for pair in self.ends:
            for end in pair:
                end.close()

    def arrived(self, target: int, now: float) -> list[int]:
        """Ports of the packets that have come to `target` since the last time."""
        self.switch.advance(now)
        found = []
        try:
            while True:
                found.append(int.from_bytes(self.ends[target][0].recv(65536)[20:22], "big"))
        except BlockingIOError:
            return found


@pytest.fixture
def played() -> Iterator[Played]:
    one = Played(4)
    yield one
    one.close()


def test_a_packet_takes_its_bytes_over_the_rate_and_the_delay(played: Played) -> None:
    played.switch.sent(0, packet(0, 1, 200), 10.0)
    assert played.arrived(1, 10.0 + 0.2 + DELAY - 1e-6) == []
    assert played.arrived(1, 10.0 + 0.2 + DELAY) == [1]


def test_a_link_carries_one_packet_at_a_time_and_both_directions_at_once(played: Played) -> None:
    for port in (1, 2):
        played.switch.sent(0, packet(0, 1, 200, port), 0.0)
    played.switch.sent(1, packet(1, 0, 200, 3), 0.0)
    assert played.arrived(1, 0.2 + DELAY) == [1]
    assert played.arrived(0, 0.2 + DELAY) == [3]
    assert played.arrived(1, 0.4 + DELAY - 1e-6) == []
    assert played.arrived(1, 0.4 + DELAY) == [2]


def test_a_receivers_link_binds_where_many_send_to_it(played: Played) -> None:
    for source in (0, 1, 2):
        played.switch.sent(source, packet(source, 3, 200, source), 0.0)
    assert [played.arrived(3, moment + DELAY) for moment in (0.2, 0.4, 0.6)] == [[0], [1], [2]]


def test_connections_share_a_link_evenly_whatever_waits(played: Played) -> None:
    for _ in range(4):  # four large ones of one connection wait before the first of another comes
        played.switch.sent(0, packet(0, 1, 400, 7), 0.0)
    for _ in range(4):
        played.switch.sent(0, packet(0, 2, 90, 8), 0.0)
    assert played.arrived(2, 0.76 + DELAY) == [8] * 4  # behind the one on the link, before the other three
    assert played.arrived(1, 0.76 + DELAY) == [7]
    assert played.arrived(1, 2.0 + DELAY) == [7] * 3


def test_a_late_switch_loses_no_time_of_the_link(played: Played) -> None:
    for port in range(5):
        played.switch.sent(0, packet(0, 1, 200, port), 0.0)
    assert played.arrived(1, 1.0 + DELAY) == [0, 1, 2, 3, 4]


def test_a_link_that_was_idle_begins_anew(played: Played) -> None:
    played.switch.sent(0, packet(0, 1, 200, 1), 0.0)
    assert played.arrived(1, 5.0) == [1]
    played.switch.sent(0, packet(0, 1, 200, 2), 5.0)
    assert played.arrived(1, 5.2 + DELAY - 1e-6) == []
    assert played.arrived(1, 5.2 + DELAY) == [2]


def test_what_is_for_nobody_goes_nowhere(played: Played) -> None:
    solicitation = bytes([0x60]) + bytes(47)
    for stray in (packet(0, 99, 200), solicitation):
        played.switch.sent(0, stray, 0.0)
    assert [played.arrived(target, 100.0) for target in range(4)] == [[]] * 4


def test_a_reading_says_what_is_off() -> None:
    rate, round_trip = 100e6, 5e-3
    assert Reading(91e6, 109e6, 6.9e-3).wrong(rate, round_trip) == ""
    assert "expected 100 Mbit/s within 10%, found 89.0" in Reading(89e6, 99e6, 5e-3).wrong(rate, round_trip)
    assert "found 111.0" in Reading(99e6, 111e6, 5e-3).wrong(rate, round_trip)
    assert "expected a round trip of 5 ms within 2 ms, found 7.10" in Reading(99e6, 99e6, 7.1e-3).wrong(
        rate, round_trip
    )


@pytest.mark.parametrize(("count", "rate", "round_trip"), [(1, 1e6, 0.0), (251, 1e6, 0.0), (2, 0.0, 0.0), (2, 1, -1)])
def test_links_that_cannot_be_are_refused(count: int, rate: float, round_trip: float) -> None:
    with pytest.raises(ValueError, match="expected 2 to 250 namespaces"):
        SlowLinks(count, rate, round_trip)


# -- real namespaces


def may_make_namespaces() -> bool:
    made = sys.platform == "linux" and Path("/dev/net/tun").exists()
    return made and subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0


TALK = """
import socket, sys
here, there = sys.argv[1:]
payload = bytes(range(256)) * 1200  # some 300 KB: packets are put together and cut
with socket.create_server((here, 4000)) as server:
    print("listening", flush=True)
    sys.stdin.readline()
    with socket.create_connection((there, 4000), timeout=20) as out, server.accept()[0] as into:
        out.sendall(payload)
        out.shutdown(socket.SHUT_WR)
        assert b"".join(iter(lambda: into.recv(1 << 16), b"")) == payload
print("done", flush=True)
sys.stdin.read()
"""


def test_processes_in_namespaces_talk_and_nothing_is_left_afterwards() -> None:
    links = SlowLinks(3, 100e6, 2e-3)
    if not may_make_namespaces():
        with pytest.raises(SlowLinksError, match="slow links need"):
            links.__enter__()
        return
    before = os.listdir("/proc/self/fd")
    with links:
        talkers = []
        for index, address in enumerate(links.addresses):
            command = [sys.executable, "-S", "-c", TALK, address, links.addresses[(index + 1) % 3]]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            talkers.append(subprocess.Popen(command, preexec_fn=links.entering(index), **pipes))
        assert [next(iter(one.stdout)) for one in talkers] == ["listening\n"] * 3
        for one in talkers:
            one.stdin.write("go\n")
            one.stdin.flush()
        assert [next(iter(one.stdout)) for one in talkers] == ["done\n"] * 3
        assert links.processor_seconds() > 0
        assert links.dropped() == 0
        (switch,) = [child for child in psutil.Process().children() if str(switch_path()) in child.cmdline()]
        for one in talkers:
            one.communicate(timeout=20)
    assert not switch.is_running()
    assert os.listdir("/proc/self/fd") == before


def switch_path() -> Path:
    return Path(namespace.__file__).with_name("switch.py")


def test_the_links_measure_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    if not may_make_namespaces():
        return
    monkeypatch.setattr(gauge, "WARM", 0.2)
    monkeypatch.setattr(gauge, "GOODPUT_WITHIN", 0.0)
    with SlowLinks(2, 50e6, 4e-3) as links:
        with pytest.raises(SlowLinksError, match=r"expected 50 Mbit/s within 0%, found \d+.*goodput .* round trip"):
            links.measured()


def test_ranks_and_switch_end_with_the_process_that_made_them() -> None:
    if not may_make_namespaces():
        return
    script = f"""
import subprocess, sys, os, signal
sys.path.insert(0, {str(Path(__file__).parents[2] / "benchmarks")!r})
from slow_links import SlowLinks
links = SlowLinks(2, 1e6).__enter__()
child = subprocess.Popen(["sleep", "600"], preexec_fn=links.entering(1))
print(child.pid, links._switch.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode < 0, done.stderr
    for pid in map(int, done.stdout.split()):
        for process in [psutil.Process(pid)] if psutil.pid_exists(pid) else []:
            process.wait(timeout=20)


def test_without_the_right_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(address: str) -> namespace.Namespace:
        raise PermissionError(1, "unshare: Operation not permitted")

    monkeypatch.setattr(namespace, "create", refused)
    with pytest.raises(SlowLinksError, match="the right to make network namespaces; run as root"):
        SlowLinks(2, 1e6).__enter__()


def test_plans_run_beside_one_another_on_slow_links() -> None:
    benchmark = Path(__file__).parents[2] / "benchmarks" / "slow_grid.py"
    small = ["--rounds", "1", "--layers", "1", "--width", "64", "--vocabulary", "64", "--megabits", "100"]
    done = subprocess.run(
        [sys.executable, str(benchmark), "--suite", "sharding", *small], capture_output=True, text=True, timeout=240
    )
    if done.returncode == 2:  # no right to have links, or a machine too busy for links that are what they claim
        assert done.stderr.startswith("slow_grid: ") and ("links" in done.stderr), done.stderr
        return
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout[done.stdout.index("\n{\n") :])
    assert [one["plan"] for one in result["plans"]] == ["data", "zero-3", "zero-1"]
    assert [one["forecast bytes ÷ counted"] for one in result["plans"]] == [1.0] * 3
    assert [one["row"] for one in result["rows"]] == ["data ÷ zero-3 >= 1", "zero-1 ÷ zero-3 >= 1"]
    assert "goodput" in result["links"]
