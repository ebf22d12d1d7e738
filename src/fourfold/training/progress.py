"""What a person sees of a run: a bar on a terminal, plain lines elsewhere. It is fed with journal records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from fourfold.training.journal import Record

PLAIN_LINES = 20
"""Lines of steps that a whole run prints where there is no terminal."""


class Screen(Protocol):
    """Where records go."""

    def show(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """No record follows."""
        ...


def screen(steps: int, console: Console | None = None) -> Screen:
    """A bar on a terminal, plain lines where output is piped.

    Args:
        steps: optimizer steps of the whole run.
        console: where to print; None: standard output.
    """
    console = console or Console(highlight=False)
    if console.is_terminal:
        return Bar(steps, console)
    return Plain(steps, lambda line: console.print(line, markup=False, soft_wrap=True))


class Plain:
    """A line now and then."""

    def __init__(self, steps: int, write: Callable[[str], None]) -> None:
        self._steps, self._write = steps, write
        self._every = max(1, steps // PLAIN_LINES)
        self._left = TimeLeft(steps)

    def show(self, record: Record) -> None:
        """Print a record if it is worth a line."""
        if record["kind"] != "step":
            line = words(record)
            if line:
                self._write(line)
            return
        left = self._left.after(record["step"])
        if record["step"] % self._every == 0 or record["step"] in (1, self._steps):
            rest = f"  {_clock(left)} left" if left is not None and record["step"] < self._steps else ""
            self._write(f"step {record['step']}/{self._steps}  {measures(record)}{rest}")

    def close(self) -> None:
        """Nothing to take down."""


class Bar:
    """A progress bar; other records are printed above it."""

    def __init__(self, steps: int, console: Console) -> None:
        self._console, self._steps = console, steps
        self._left = TimeLeft(steps)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[measures]}", markup=False),
            TextColumn("{task.fields[time]}", style="cyan", markup=False),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("train", total=steps, measures="starting", time="")
        self._progress.start()

    def show(self, record: Record) -> None:
        """Move the bar, or print above it."""
        step = record["step"]
        if record["kind"] == "step":
            left = self._left.after(step)
            time = "" if left is None else f"{_clock(left)} left" if step < self._steps else "done"
            self._progress.update(self._task, completed=step, measures=measures(record), time=time)
            return
        if record["kind"] == "resume":
            self._progress.update(self._task, completed=step)
        line = words(record)
        if line:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


def say(lines: Iterable[str], console: Console | None = None) -> None:
    """Print lines of the form "word: text", the word in colour where there is a terminal."""
    console = console or Console(highlight=False)
    for line in lines:
        word, colon, text = line.partition(": ")
        console.print(Text.assemble((word, "bold cyan"), colon, text) if colon else Text(line), soft_wrap=True)


@contextmanager
def busy(what: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Say on a terminal what is waited for, and take it away again. Gives a function that says how far it has come.

    Nothing is drawn in between: forecasts run in forked processes, and a thread that draws must not be in them.
    """
    console = console or Console(highlight=False)
    if not console.is_terminal:
        yield lambda text: None
        return
    width = console.width - 1  # a full line would begin another one

    def tell(text: str) -> None:
        console.print(Text(f"{what}{text} …"[:width].ljust(width), style="dim"), end="\r")

    tell("")
    try:
        yield lambda text: tell(f": {text}")
    finally:
        console.print(" " * width, end="\r")


class TimeLeft:
    """Time left, from the pace since the first record seen."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self._began: tuple[int, float] | None = None

    def after(self, step: int) -> float | None:
        """Seconds left once `step` steps are done; None before there is a pace."""
        if self._began is None or step < self._began[0]:
            self._began = (step, self._clock())
        first, began = self._began
        return (self._clock() - began) / (step - first) * (self._steps - step) if step > first else None


def measures(record: Record) -> str:
    """Loss, speed, use of the machine and memory of one step, in one line."""
    parts = [f"loss {record['loss']:.4f}"]
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.0%}")
    if "memory" in record:
        parts.append(f"process {record['memory'] / 2**20:,.0f} MiB")
    return "  ".join(parts)


def words(record: Record) -> str:
    """A record other than a step, in words; empty for one that nobody needs to read."""
    kind, step = record["kind"], record["step"]
    if kind == "evaluation":
        return f"step {step}  validation loss {record['loss']:.4f}  ({record['count']:,} tokens)"
    if kind == "checkpoint":
        return f"step {step}  saved {record['path']}"
    if kind == "resume":
        path = record.get("path")
        return f"resumed at step {step} from {path}" if path else f"started again at step {step}"
    if kind == "kernels":
        changed = sum(choice["way"] != choice["layouts"] for choice in record["choices"])
        return (
            f"kernels: {changed} of {len(record['choices'])} products of cut linears are multiplied in another layout"
        )
    if kind == "note":
        return str(record["text"])
    if kind == "end" and record.get("sample"):
        return f"sample:\n{_printable(record['sample'])}"
    return ""


def _printable(text: str) -> str:
    """A model may write control characters, which a terminal would obey."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
