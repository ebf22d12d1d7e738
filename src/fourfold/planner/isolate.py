"""A function in a process of its own: what aborts there does not abort here."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


class IsolationError(RuntimeError):
    """The function failed in its process; the message holds its error."""


def isolated(function: Callable[[], Any], *, seconds: float = 600.0) -> Any:
    """Call `function` in a forked child and return its result, which must be plain JSON.

    The child has a copy of everything, so that any callable can be called; it computes on one thread, since the
    parent's compute threads do not exist there. Where CUDA is in use a child cannot run autograd, and the function
    is called here instead.

    Raises:
        IsolationError: the function raised, the process died (with the signal), or `seconds` went by.
    """
    if torch.cuda.is_initialized():
        return json.loads(json.dumps(function()))
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(function, writer)
    os.close(writer)
    ended = False
    try:
        text, ended = _read(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        if not ended:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    if not ended:
        raise IsolationError(f"no result after {seconds:g} s; the process was ended")
    return _result(text, status)


def _child(function: Callable[[], Any], writer: int) -> None:
    """The forked side: never returns."""
    code = 1
    try:
        torch.set_num_threads(1)
        try:
            result = {"value": function()}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(writer, "w", encoding="utf-8") as pipe:
            json.dump(result, pipe)
        code = 0
    finally:
        os._exit(code)


def _read(reader: int, deadline: float) -> tuple[bytes, bool]:
    """Everything that the child writes, and whether it closed its end before the deadline."""
    chunks = []
    while (left := deadline - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            chunk = os.read(reader, 1 << 16)
            if not chunk:
                return b"".join(chunks), True
            chunks.append(chunk)
    return b"", False


def _result(text: bytes, status: int) -> Any:
    if os.WIFSIGNALED(status):
        raise IsolationError(f"the process died of {signal.Signals(os.WTERMSIG(status)).name}")
    if not text:
        raise IsolationError(f"the process ended with status {os.waitstatus_to_exitcode(status)} and no result")
    result = json.loads(text)
    if "error" in result:
        raise IsolationError(result["error"])
    return result["value"]
