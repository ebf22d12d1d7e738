"""Saves into folders that refuse: `hostile_disk.py FOLDER mounts|plain` prints one JSON line for each case.

A full and a read-only file system are real ones, mounted in a mount namespace of this process (it is started under
`unshare`, and told `mounts`); the limit on a file's size and the folder of another user need no namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from fourfold.training.checkpoint import Box, CheckpointError, DiskFull, coordination, latest, prepare, save

NOBODY = 65534


def put(folder: Path, step: int, count: int) -> None:
    """One writer saves `count` float32 elements."""
    save(folder, step, [Box.whole("w", torch.ones(count))], {}, rank=0, writers=[0], asynchronous=False)


def report(case: str, folder: Path, act: Callable[[], object]) -> None:
    """Run `act`, and print the kind and words of its error, and what the newest checkpoint is then."""
    try:
        act()
        error = ["", ""]
    except CheckpointError as caught:
        error = [type(caught).__name__, str(caught)]
    newest = latest(folder)
    print(json.dumps({"case": case, "error": error, "latest": newest and newest.name}), flush=True)


def in_child(act: Callable[[], None]) -> None:
    """Run in a fork, so that a limit or another user stays there."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        act()
        os._exit(0)
    os.waitpid(child, 0)


def file_limit(folder: Path) -> None:
    """No file may grow beyond 64 KiB."""
    put(folder, 1, 10)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    report("file limit", folder, lambda: put(folder, 2, 100_000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    report("room again, limit", folder, lambda: put(folder, 2, 100_000))


def other_user(folder: Path) -> None:
    """A folder that may be read and not written; root becomes nobody first, since modes do not hold it."""
    put(folder, 1, 10)
    os.chmod(folder, 0o555)
    os.chdir(folder.parent)
    os.chmod(folder.parent, 0o755)
    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    report("other user", Path(folder.name), lambda: prepare(Path(folder.name)))
    report("other user, saving", Path(folder.name), lambda: put(Path(folder.name), 2, 10))


def small_disk(mount: Path) -> None:
    """A file system of 1 MiB, then one without free inodes, then a read-only one."""
    folder = mount / "checkpoints"
    put(folder, 1, 50_000)
    report("full, known before", folder, lambda: put(folder, 2, 300_000))

    def late() -> None:
        saving = save(folder, 2, [Box.whole("w", torch.ones(300_000))], {}, rank=0, writers=[0])
        while not saving.done:
            pass
        put(folder, 3, 10)

    report("full, told at the next save", folder, late)

    def other() -> None:
        large, small = Box("w", (300_001,), (0,), torch.ones(300_000)), Box("w", (300_001,), (300_000,), torch.ones(1))
        first = save(folder, 2, [large], {}, rank=0, writers=[0, 1])
        try:
            save(folder, 2, [small], {}, rank=1, writers=[0, 1], asynchronous=False)
        finally:
            with contextlib.suppress(DiskFull):
                first.wait()

    report("told to the other writer", folder, other)
    fillers = []
    try:
        while True:
            fillers.append(mount / f"filler-{len(fillers)}")
            fillers[-1].touch()
    except OSError:
        fillers.pop()
    report("full, known only when writing", folder, lambda: put(folder, 2, 10))
    for filler in fillers:
        filler.unlink()
    report("room again, disk", folder, lambda: put(folder, 2, 10))
    subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
    report("read-only", folder, lambda: prepare(folder))
    report("read-only, saving", folder, lambda: put(folder, 3, 10))


def main() -> None:
    root = Path(sys.argv[1])
    coordination._GRACE = 0.1
    in_child(lambda: file_limit(root / "limit"))
    in_child(lambda: other_user(root / "user" / "checkpoints"))
    if sys.argv[2] == "mounts":
        mount = root / "disk"
        mount.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=40", "tmpfs", str(mount)], check=True)
        small_disk(mount)


if __name__ == "__main__":
    main()
