"""CPU time of `fourfold --help` against an empty interpreter's. It holds when the ratio of the medians is at most 20.

    python benchmarks/startup.py

User and system time of each child process are taken from the operating system; runs alternate, so that a machine that
gets slower meanwhile slows both.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile

PAIRS = 15
LIMIT = 20.0
EMPTY = (sys.executable, "-c", "pass")
HELP = (sys.executable, "-m", "fourfold", "--help")


def cpu_seconds(command: tuple[str, ...], environment: dict[str, str]) -> float:
    """User and system seconds of one run, its output thrown away.

    Raises:
        CalledProcessError: the command failed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(cache: str) -> tuple[list[float], list[float]]:
    """Times of both commands, byte-compiled files kept in `cache`, as an installed Python keeps them."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    empty: list[float] = []
    shown: list[float] = []
    for command in (EMPTY, HELP):  # the first run compiles and reads from disk
        cpu_seconds(command, environment)
    for pair in range(PAIRS):
        for command, times in ((EMPTY, empty), (HELP, shown))[:: 1 if pair % 2 else -1]:
            times.append(cpu_seconds(command, environment))
    return empty, shown


def main() -> int:
    """Print both medians and their ratio; 0 if it is within the limit."""
    with tempfile.TemporaryDirectory() as cache:
        empty, shown = measure(cache)
    ratio = statistics.median(shown) / statistics.median(empty)
    milliseconds = [1000 * statistics.median(times) for times in (empty, shown)]
    print(f"empty interpreter {milliseconds[0]:.0f} ms, --help {milliseconds[1]:.0f} ms of CPU ({PAIRS} pairs)")
    print(f"ratio {ratio:.1f}, at most {LIMIT:.0f}: {'holds' if ratio <= LIMIT else 'does not hold'}")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
