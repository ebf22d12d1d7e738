"""A training command whose disk refuses: `mishaps.py CASE …` becomes `fourfold train …` under CASE.

full: no file may grow beyond 64 KiB, as on a disk that has become full. modes: modes of files hold root too.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

ROOM = 1 << 16
PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE = 1
"""Of Linux: what lets root write where the mode forbids it. What is dropped is gone in the program that is started."""


def full() -> None:
    """Writing beyond the limit is an error; Python ignores the signal that comes with it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))


def modes() -> None:
    """Everybody but root is held by them anyway."""
    if os.getuid() == 0 and ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0):
        raise SystemExit("the capability cannot be dropped")


CASES = {"full": full, "modes": modes}


if __name__ == "__main__":
    CASES[sys.argv[1]]()
    os.execv(sys.executable, [sys.executable, "-m", "fourfold", "train", *sys.argv[2:]])
