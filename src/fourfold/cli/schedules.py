"""`fourfold schedule`: a schedule laid out, drawn and measured in virtual time, without a model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fourfold.config import ConfigError
from fourfold.config.problem import Problem
from fourfold.ledger import Ledger
from fourfold.plan import Technique, techniques
from fourfold.plan.technique import TechniqueError
from fourfold.schedule import Program, Shape, Timeline, Virtual, bind, draw, simulate, validate
from fourfold.schedule.action import MOVE
from fourfold.schedule.costs import Costs
from fourfold.schedule.figures import bubble, held
from fourfold.schedule.order import chunks_of
from fourfold.schedule.ready import drive_ready

STEPS = 6
"""Of an order that never empties its pipeline, so many steps are laid out, from empty to empty."""


@dataclass(frozen=True)
class Laid:
    """A schedule over a shape, in virtual time.

    Attributes:
        name: of the schedule, as people write it.
        shape: over what it is laid.
        timeline: with the given costs.
        files: what was written.
    """

    name: str
    shape: Shape
    timeline: Timeline
    files: tuple[str, ...] = ()
    ok: bool = True

    @property
    def unit(self) -> float:
        """Seconds a column: the shortest action that takes time."""
        return min((end - start for _, start, end in self.timeline if end > start), default=1.0)

    def to_dict(self) -> dict[str, Any]:
        """Shape and figures."""
        shape = {entry.name: getattr(self.shape, entry.name) for entry in fields(self.shape)}
        program = self.timeline.program
        return {
            "schedule": self.name,
            **shape,
            "makespan": self.timeline.makespan,
            "bubble": bubble(self.timeline),
            "held": held(program),
            "moves": sum(action.kind == MOVE for action in program.actions),
            "files": list(self.files),
        }

    def text(self) -> str:
        """The staircase and its figures."""
        found, shape = self.to_dict(), self.shape
        about = f"{shape.stages} stages on {shape.workers} workers, {shape.microbatches} micro-batches"
        figures = (
            f"makespan {found['makespan']:g}, bubble {found['bubble']:.1%}, "
            f"in flight {', '.join(map(str, found['held']))}, {found['moves']} moves"
        )
        written = "".join(f"wrote {file}\n" for file in self.files)
        return f"{self.name}: {about}\n{draw(self.timeline, self.unit)}{figures}\n{written}".rstrip()


@dataclass(frozen=True)
class Compared:
    """Two schedules over the same workers and micro-batches.

    Attributes:
        both: laid out.
    """

    both: tuple[Laid, Laid]
    ok: bool = True

    @property
    def first(self) -> str:
        """The first action in which they differ, worker by worker in time, in words."""
        for worker in range(self.both[0].shape.workers):
            lines = [_lane(laid, worker) for laid in self.both]
            for (mine, start), (other, theirs) in zip(*lines, strict=False):
                if (mine, start) != (other, theirs):
                    names = [laid.name for laid in self.both]
                    return f"worker {worker}: {names[0]} runs {mine} at {start:g}, {names[1]} {other} at {theirs:g}"
        return "none"

    def to_dict(self) -> dict[str, Any]:
        """Figures of both."""
        return {"schedules": [laid.to_dict() for laid in self.both], "first difference": self.first}

    def text(self) -> str:
        """One under the other."""
        return "\n\n".join([*(laid.text() for laid in self.both), f"first difference: {self.first}"])


def laid(
    name: str, stages: int, microbatches: int, options: Sequence[str], costs: Costs, files: Sequence[Path] = ()
) -> Laid:
    """Lay a schedule out, and write its picture or its trace.

    Args:
        name: of the schedule.
        stages: of the model; a worker has as many of them as the schedule wants.
        microbatches: of a step.
        options: further ones of the schedule, `chunks=4`.
        costs: seconds of an action.
        files: pictures (.svg) and traces (.json or .json.gz) to write.

    Raises:
        ConfigError: no such schedule or option, or a shape that it cannot be laid over.
    """
    try:
        technique = Technique.find("schedule", name, {"microbatches": microbatches, **_options(options)})
        chunks = chunks_of(technique.options)
        if stages % chunks:
            raise TechniqueError(
                f"{technique.spelling} gives each worker {chunks} stages: expected a multiple of {chunks}, "
                f"found --stages {stages}; try {stages + chunks - stages % chunks}"
            )
        steps = STEPS if hasattr(technique.module, "stream") else 1
        shape = Shape(stages, microbatches * steps, stages // chunks, chunks)
        program = validate(bind(technique.module.order(shape, technique.options), shape.workers), shape)
    except ValueError as error:
        raise ConfigError([Problem("command line", "", str(error))]) from error
    timeline = _timeline(technique, shape, program, costs)
    for file in files:
        _write(file, timeline)
    return Laid(technique.spelling, shape, timeline, tuple(map(str, files)))


def _timeline(technique: Technique, shape: Shape, program: Program, costs: Costs) -> Timeline:
    """By the list, or as messages come if that is how the schedule runs."""
    if not hasattr(technique.module, "mode"):
        return simulate(program, costs)
    return drive_ready(program, Virtual(shape.workers, costs), technique.module.mode(shape, technique.options))


def names() -> tuple[str, ...]:
    """Of all schedules."""
    return techniques("schedule")


def _options(given: Sequence[str]) -> dict[str, int]:
    found = {}
    for one in given:
        key, _, value = one.partition("=")
        if not value.lstrip("-").isdigit():
            raise TechniqueError(f"{one}: expected an option of the schedule as NAME=NUMBER, for example chunks=4")
        found[key] = int(value)
    return found


def _lane(one: Laid, worker: int) -> list[tuple[str, float]]:
    from fourfold.schedule.draw import label
    from fourfold.schedule.program import Lane

    numbers = one.timeline.program.lanes.get(Lane(worker, "compute"), ())
    starts = one.timeline.starts
    return [(label(one.timeline.program.actions[number], True), starts[number] or 0.0) for number in numbers]


def _write(file: Path, timeline: Timeline) -> None:
    from fourfold.report import staircase, trace

    if file.suffix == ".svg":
        file.write_text(staircase.svg(timeline), encoding="utf-8")
        return
    workers = range(timeline.program.workers)
    ledgers = {worker: Ledger(rank=worker) for worker in workers}
    for span in timeline.spans():
        ledgers[span.args["worker"]].spans.append(span)
    events = list(trace.trace(ledgers, {"pipe": len(workers)}))
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
    file.write_bytes(gzip.compress(text.encode(), mtime=0) if file.suffix == ".gz" else text.encode())
