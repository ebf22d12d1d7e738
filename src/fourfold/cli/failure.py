"""From an exception to an exit code and one screen of plain words."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
import traceback

FAILED, BAD_INPUT, DEFECT, STOPPED = 1, 2, 3, 130
WRONG_PATH = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EROFS}
"""Errors of the operating system that another path, or other permissions, would cure."""


def report(error: BaseException, as_json: bool) -> int:
    """Say what went wrong on stderr (with `--json` also on stdout, as `{"ok": false, …}`) and return the exit code."""
    if isinstance(error, BrokenPipeError):
        # The reader of our output is gone; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    code, text = _judge(error)
    print(text, file=sys.stderr)
    if as_json:
        from fourfold.cli.outcome import encode

        problems = [vars(problem) for problem in getattr(error, "problems", ())]
        print(encode({"ok": False, "exit_code": code, "error": text, "problems": problems}))
    return code


def _judge(error: BaseException) -> tuple[int, str]:
    if isinstance(error, KeyboardInterrupt):
        return STOPPED, "stopped"
    words = _usage(error)
    if words is not None:
        return BAD_INPUT, words
    if isinstance(error, OSError) and error.errno is not None:
        where = f": {error.filename}" if error.filename is not None else ""
        code = BAD_INPUT if error.errno in WRONG_PATH else FAILED
        return code, f"{error.strerror or type(error).__name__}{where}; {_cure(error.errno)}"
    if type(error).__module__.partition(".")[0] == "fourfold":
        # Our own exceptions carry their words: a ValueError is the user's to mend, anything else is a run that failed.
        return BAD_INPUT if isinstance(error, ValueError) else FAILED, str(error)
    return DEFECT, f"{type(error).__name__}: {_line(error)}\nthis is a defect of fourfold; traceback: {_keep(error)}"


def _usage(error: BaseException) -> str | None:
    """Words for a command line that does not parse, None for any other error."""
    from cyclopts import CycloptsError

    if not isinstance(error, CycloptsError):
        return None
    words = " ".join(str(error).split())
    match = re.search(r"Unknown option: --?([\w.]+\.[\w.]+)", words)
    words += f" Settings are given without dashes: {match[1]}=…" if match else ""
    chain = " ".join(getattr(error, "command_chain", None) or ())
    return f"{words} (`fourfold {chain + ' ' if chain else ''}--help` lists what there is)"


def _cure(number: int) -> str:
    cures = {
        errno.ENOSPC: "free some space, or choose another run.folder",
        errno.EACCES: "check its permissions, or choose another folder",
        errno.EROFS: "choose a folder that can be written",
        errno.EADDRINUSE: "another process holds that port; set launch.address=null for a free one",
    }
    return cures.get(number, "check the path")


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no message"])[0][:200]


def _keep(error: BaseException) -> str:
    """Write the traceback to a file and return its path."""
    with tempfile.NamedTemporaryFile("w", prefix="fourfold-traceback-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    return file.name
