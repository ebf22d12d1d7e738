"""What surrounds a run on this machine: versions, limits, files, ports, clock, leftovers. No speeds here."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from fourfold.verify.diagnosis import Finding

GIB = 1024**3
PACKAGES = ("fourfold", "torch", "numpy", "transformers", "tokenizers", "safetensors", "pydantic", "cyclopts", "jinja2")
OLDEST, NEWEST = (2, 13), (2, 15)
"""Supported torch: from the first, below the second."""


def versions() -> Iterator[Finding]:
    """Python, torch and the packages that a run reads, to paste into a bug report."""
    system = f"{platform.system()} {platform.release()} ({platform.machine()})"
    yield Finding("python", "good", f"{platform.python_version()} on {system}")
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            yield Finding(package, "wrong", "not installed", f"it is a dependency of fourfold: pip install {package}")
    torch = found.get("torch", "")
    release = tuple(int(part) for part in torch.split("+")[0].split(".")[:2] if part.isdecimal())
    if torch and not OLDEST <= release < NEWEST:
        advice = "supported are 2.13 and 2.14: pip install 'torch>=2.13,<2.15'"
        yield Finding("torch", "warning", torch, advice)
    yield Finding("packages", "good", ", ".join(f"{package} {number}" for package, number in found.items()))


def cores() -> int:
    """Physical cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def memory() -> int:
    """Bytes of main memory that this process may use: the machine's, or its control group's limit if that is lower."""
    limits = [psutil.virtual_memory().total]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        limits.append(int(text))
    return min(limits)


def space(cache: Path) -> Iterator[Finding]:
    """Memory, shared memory, and disk where caches and runs go."""
    free = psutil.virtual_memory().available
    advice = "close other programs, or take a smaller batch or model" if free < GIB else ""
    found = f"{free / GIB:.1f} GiB free of {memory() / GIB:.1f}"
    yield Finding("memory", "warning" if advice else "good", found, advice)
    shared = Path("/dev/shm")
    if shared.is_dir():
        left = shutil.disk_usage(shared).free
        advice = "a container's default is 64 MB: start it with --shm-size=1g" if left < GIB // 4 else ""
        yield Finding("shared memory", "warning" if advice else "good", f"{left / GIB:.1f} GiB free", advice)
    for name, folder in (("disk, cache", cache), ("disk, here", Path.cwd())):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        left = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK):
            yield Finding(name, "wrong", f"{existing} cannot be written", "change its owner, or run in another folder")
            continue
        advice = "checkpoints may not fit: free some space or set run.folder elsewhere" if left < GIB else ""
        yield Finding(name, "warning" if advice else "good", f"{left / GIB:.1f} GiB free", advice)


def limits() -> Iterator[Finding]:
    """File descriptors, ports and the clock."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"gloo opens a few for each pair of ranks: ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    low = soft < 1024 and soft != resource.RLIM_INFINITY
    yield Finding("open files", "warning" if low else "good", f"at most {soft}", advice if low else "")
    yield _ports()
    yield _clock()
    busy = os.getloadavg()[0]
    advice = (
        "speeds measured now are lower than this machine's own; wait or stop the other work" if busy > cores() else ""
    )
    yield Finding("load", "warning" if advice else "good", f"{busy:.1f} on {cores()} cores", advice)


def _ports() -> Finding:
    """Sixteen listening sockets on loopback at once, as many as a small group of ranks needs."""
    sockets = [socket.socket() for _ in range(16)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
            one.listen()
        names = ", ".join(str(one.getsockname()[1]) for one in sockets[:3])
        return Finding("ports", "good", f"loopback gives free ports ({names}, ...)")
    except OSError as error:
        advice = "ranks meet on loopback: is the interface up (ip link set lo up), and may this user open sockets?"
        return Finding("ports", "wrong", f"cannot listen on 127.0.0.1: {error.strerror}", advice)
    finally:
        for one in sockets:
            one.close()


def _clock() -> Finding:
    """The file system's clock against the processor's: checkpoints are ordered by name, but tools compare times."""
    with tempfile.NamedTemporaryFile() as file:
        skew = abs(os.stat(file.name).st_mtime - time.time())
    resolution = time.get_clock_info("perf_counter").resolution
    found = f"resolution {resolution * 1e9:.0f} ns, file system {skew:.3f} s apart"
    if skew > 2.0:
        return Finding("clock", "warning", found, "the file system's clock differs: let both follow one time server")
    return Finding("clock", "good", found)


def leftovers() -> Iterator[Finding]:
    """Workers whose parent is gone, and shared files that no process holds any more."""
    orphans = [f"{pid} ({age / 60:.0f} min)" for pid, age in _orphans()]
    if orphans:
        advice = "workers without a parent hold ports and memory; if they are not yours to keep: kill " + " ".join(
            orphan.split()[0] for orphan in orphans
        )
        yield Finding("stale processes", "warning", ", ".join(orphans), advice)
    else:
        yield Finding("stale processes", "good", "none")
    stale = [str(path) for path in _shared_files() if not _held(path)]
    advice = "left by a run that was killed; delete them: rm -r " + " ".join(stale) if stale else ""
    yield Finding("stale files", "warning" if stale else "good", ", ".join(stale) or "none", advice)


def _orphans() -> Iterator[tuple[int, float]]:
    mine = psutil.Process().username()
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "username", "create_time", "status"]):
        facts = process.info
        words = facts["cmdline"] or []
        ours = any(word == "fourfold" or word.startswith("fourfold.") or word.endswith("/fourfold") for word in words)
        if ours and facts["ppid"] == 1 and facts["username"] == mine and facts["status"] != psutil.STATUS_ZOMBIE:
            yield facts["pid"], time.time() - facts["create_time"]


def _shared_files() -> Iterator[Path]:
    for folder in {Path(tempfile.gettempdir()), Path("/dev/shm")}:
        if folder.is_dir():
            # Tracebacks that a person was pointed to are kept on purpose.
            kept = set(folder.glob("fourfold-traceback-*"))
            yield from sorted(set(folder.glob("fourfold-*")) - kept)


def _held(path: Path) -> bool:
    """Some process of this user maps or has open the file, or a file inside the folder."""
    prefix = str(path)
    for process in psutil.process_iter():
        try:
            maps = process.memory_maps() if hasattr(process, "memory_maps") else []  # macOS has none
            places = [entry.path for entry in (*process.open_files(), *maps)]
        except (psutil.Error, OSError):
            continue
        if any(place == prefix or place.startswith(prefix + os.sep) for place in places):
            return True
    return False
