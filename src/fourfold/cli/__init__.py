"""The command line: `fourfold train CONFIG key.path=value …`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

QUIET = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # the profiler warns of memory that it did not see allocated
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "true",  # unless it is set, it warns in the planner's forked processes, which use none
}
"""What libraries say on a terminal unless their environment tells them not to; what a person has set stays."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done, and what was checked holds; also a run that a signal stopped and that saved. 1: it does not hold, or the
    run failed. 2: bad input, said in plain words. 3: a defect of fourfold; the traceback is in a file that is named.
    130: ended at once by Ctrl-C. SIGTERM before training has begun ends the process at once as well, in words, and by
    the signal itself (143 in a shell).
    """
    from fourfold.training.stop import ended_in_words

    with ended_in_words():
        return _run(list(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    from fourfold.cli.commands import app

    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        code = app(arguments)
        sys.stdout.flush()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException as error:
        from fourfold.cli import failure

        return failure.report(error, as_json="--json" in arguments)
    return code if isinstance(code, int) else 0
