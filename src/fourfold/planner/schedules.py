"""All schedules over one model and one machine: which of them fit, how long each takes, and what the losers lose by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rich.table import Table

from fourfold.hardware import Cluster
from fourfold.placement.pipe.cuts import balanced, possible
from fourfold.placement.refusals import PlacementError
from fourfold.plan import Plan, Technique, techniques
from fourfold.planner import clock
from fourfold.planner.forecast import ForecastError, pipeline, too_much
from fourfold.planner.pipeline import Pipeline
from fourfold.planner.search import silent
from fourfold.planner.subject import OPTIMIZER_STATES
from fourfold.planner.traces import Traces
from fourfold.planner.units import in_bytes, in_seconds
from fourfold.schedule import Program, ScheduleError, simulate
from fourfold.schedule.action import MOVE, UPDATE, WEIGHT
from fourfold.schedule.figures import bubble, held
from fourfold.schedule.laid import shape_of

ROUNDS = 4
"""Micro-batches for each worker, where the plan does not say how many and the batch has the rows."""

CHUNKS = 2
"""Stages that a worker holds, where a schedule takes any number of them."""

SERIAL = "accumulate"
"""The schedule of one worker."""


@dataclass(frozen=True)
class Laid:
    """One schedule, laid over the pipeline.

    Attributes:
        plan: with the cut that the planner chose.
        seconds: of a step.
        makespan: of its passes and transfers.
        bubble: share of the workers' time in which they compute nothing.
        waiting: of the makespan, the share that would be gone if transfers took no time.
        memory: bytes on the fullest rank, at its highest moment.
        sent: bytes that all workers of one pipeline send over `pipe` in a step.
        flight: per worker, the most passes of one stage and micro-batch that are not yet all the way back.
        staleness: updates that a pass may be behind the newest weights.
        bound: why it cannot be run; empty if it can.
    """

    plan: Plan
    seconds: float = 0.0
    makespan: float = 0.0
    bubble: float = 0.0
    waiting: float = 0.0
    memory: int = 0
    sent: int = 0
    flight: tuple[int, ...] = ()
    staleness: int = 0
    bound: str = ""

    @property
    def name(self) -> str:
        """The schedule with its options, but for the micro-batches."""
        technique = self.plan.schedule
        listed = [one.name for one in fields(technique.options) if one.name != "microbatches"]
        options = "".join(f", {name} {getattr(technique.options, name)}" for name in listed)
        return technique.spelling + options

    def behind(self, best: Laid) -> str:
        """In words, what it loses to the best, or why it cannot be."""
        if self.bound or self is best:
            return self.bound
        more = f"{self.seconds / best.seconds - 1:.1%} longer" if self.seconds > best.seconds else "as fast"
        reasons = [f"bubble {self.bubble:.1%}, the best has {best.bubble:.1%}"]
        if self.waiting > best.waiting + 0.005:
            reasons.append(f"waits {self.waiting:.1%} for transfers, the best {best.waiting:.1%}")
        if self.memory > best.memory:
            reasons.append(f"holds {self.memory / best.memory - 1:.0%} more")
        return f"{more}: {'; '.join(reasons)}"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON; bytes and seconds."""
        figures = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("plan", "flight")}
        return {"schedule": self.name, "plan": self.plan.to_dict(), "flight": list(self.flight), **figures}


@dataclass(frozen=True)
class Schedules:
    """All of them, ranked: those that fit by time, the others after them.

    Attributes:
        budget: bytes that a device has.
    """

    laid: tuple[Laid, ...]
    budget: int

    @property
    def ok(self) -> bool:
        """Some schedule fits."""
        return any(not one.bound for one in self.laid)

    @property
    def best(self) -> Laid:
        """The fastest that fits, else the first."""
        return self.laid[0]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        listed = [one.to_dict() | {"behind": one.behind(self.best)} for one in self.laid]
        return {"ok": self.ok, "budget": self.budget, "schedules": listed}

    def tables(self) -> Iterator[Any]:
        """What can run, the fastest first, and what cannot, with the reason."""
        shape = shape_of(self.best.plan)
        about = f"{shape.workers} workers, {shape.microbatches} micro-batches"
        running = [one for one in self.laid if one.flight]
        if running:
            table = Table(title=f"schedules on {about}, fastest first", title_justify="left")
            for name in ("schedule", "step", "bubble", "memory", "over pipe", "in flight", "stale", "loses by"):
                table.add_column(name, justify="left" if name in ("schedule", "loses by") else "right")
            for one in running:
                flight = str(max(one.flight))
                figures = (in_seconds(one.seconds), f"{one.bubble:.1%}", in_bytes(one.memory), in_bytes(one.sent))
                table.add_row(one.name, *figures, flight, str(one.staleness), one.behind(self.best) or "the best")
            yield table
        refused = [one for one in self.laid if not one.flight]
        if refused:
            table = Table(title=f"schedules that cannot be laid over {about}", title_justify="left")
            table.add_column("schedule")
            table.add_column("why")
            for one in refused:
                table.add_row(one.name, one.bound)
            yield table
        if self.ok:
            yield f"cut of the best: {', '.join(map(str, self.best.plan.placement.cut or ()))} layers"


def schedules(
    traces: Traces,
    cluster: Cluster,
    given: Plan | None = None,
    *,
    world: int | None = None,
    tell: Callable[[str], None] = silent,
) -> Schedules:
    """Lay every schedule over the model.

    Args:
        given: a plan whose placement is kept; its micro-batches are, too, if it is a pipeline's. None: a pipeline of
            `world` workers.
        world: workers, where the plan has no pipeline; the whole cluster unless said.
        tell: is told which schedule is being laid out.

    Raises:
        RefusedError, ForecastError: the model cannot be cut into stages at all.
    """
    base = Plan() if given is None else given
    pipe = base.placement.pipe if base.placement.pipe > 1 else (world or cluster.world) // base.placement.world
    if pipe < 2:
        raise ForecastError(
            f"schedules: a pipeline wants at least 2 workers, found {pipe}; set plan.placement.pipe or launch.workers"
        )
    placement = replace(base.placement, pipe=pipe)
    microbatches = getattr(base.schedule.options, "microbatches", 1) if base.placement.pipe > 1 else 0
    microbatches = microbatches or max(1, min(ROUNDS * pipe, traces.subject.rows // placement.parts))
    found: list[Laid] = []
    first: Pipeline | None = None
    for technique in _all(microbatches):
        tell(f"schedule {technique.spelling}")
        plan = replace(base, placement=placement, schedule=technique)
        if first is None:
            first = pipeline(traces, cluster, plan)
        found.append(lay(replace(first, plan=plan)))
    return Schedules(tuple(sorted(found, key=_rank)), cluster.device.memory)


def _all(microbatches: int) -> Iterator[Technique]:
    for name in techniques("schedule"):
        if name != SERIAL:
            options = {one.name for one in fields(Technique.find("schedule", name).options)}
            chunks = {"chunks": CHUNKS} if "chunks" in options else {}
            yield Technique.find("schedule", name, {"microbatches": microbatches, **chunks})


def _rank(one: Laid) -> tuple[bool, bool, float, int]:
    return bool(one.bound), not one.flight, one.seconds, one.memory


def lay(found: Pipeline) -> Laid:
    """One schedule, with its cut where the plan has none that fits it."""
    try:
        shape = shape_of(found.plan)
        found.program  # noqa: B018 (laid here, so that what cannot be laid is not cut)
        cut = found.plan.placement.cut
        if cut is None or len(cut) != shape.stages:
            found.plan = replace(found.plan, placement=replace(found.plan.placement, cut=chosen(found)))
        return _weighed(found)
    except (PlacementError, ScheduleError) as error:
        return Laid(found.plan, bound=str(error))


def _weighed(found: Pipeline) -> Laid:
    timeline = found.timeline(clock.LIKELY)
    program, makespan = timeline.program, timeline.makespan
    costs = [(end or 0.0) - (start or 0.0) for start, end in zip(timeline.starts, timeline.ends, strict=True)]
    moves = [one.kind == MOVE for one in program.actions]
    at_once = simulate(program, [0.0 if move else cost for move, cost in zip(moves, costs, strict=True)]).makespan
    ranks = found.ranks
    fullest = max(ranks, key=lambda rank: rank.peak)
    return Laid(
        found.plan,
        seconds=found.timing(fullest, clock.LIKELY).total,
        makespan=makespan,
        bubble=bubble(timeline),
        waiting=1 - at_once / makespan,
        memory=fullest.peak,
        sent=sum(rank.ledger.sent(axis="pipe") for rank in ranks),
        flight=tuple(held(program)),
        staleness=staleness(program),
        bound=too_much(fullest.ledger, found.cluster),
    )


def staleness(program: Program) -> int:
    """By how many updates a pass's weights are, at most, behind the newest that its worker has."""
    worst = 0
    for numbers in program.lanes.values():
        newest: dict[int, int] = {}
        for number in numbers:
            action = program.actions[number]
            for buffer in action.writes if action.kind == UPDATE else action.reads:
                if buffer.kind != WEIGHT:
                    continue
                if action.kind == UPDATE:
                    newest[buffer.stage] = buffer.version
                else:
                    worst = max(worst, newest.get(buffer.stage, 0) - buffer.version)
    return worst


def chosen(found: Pipeline) -> tuple[int, ...]:
    """Numbers of layers that make the slowest stage as fast as can be.

    Under the cap of a device's memory, as far as weights, optimizer and the stashes of as many micro-batches as there
    are workers go; where no cut holds that, without: the forecast tells what is too much.

    Raises:
        PlacementError: more stages than layers, or places where the model can be cut.
    """
    line, rows = found.line, found.rows[0]
    count = shape_of(found.plan).stages
    layers = found.cut(tuple(range(len(line.layers) + 1)), rows)
    costs = [one.forward + one.backward for one in layers]
    allowed = possible(line.layers)
    sizes = _sizes(found, [one.stash for one in layers])
    caps = [float(found.cluster.device.memory) * found.plan.placement.pipe / count] * count
    try:
        bounds = balanced(costs, count, sizes=sizes, caps=caps, allowed=allowed)
    except PlacementError:
        bounds = balanced(costs, count, allowed=allowed)
    return tuple(end - first for first, end in zip(bounds, bounds[1:], strict=False))


def _sizes(found: Pipeline, stashes: Sequence[int]) -> list[float]:
    placement, itemsize = found.plan.placement, found.types.master.itemsize
    each = itemsize * (2 + OPTIMIZER_STATES[found.traces.subject.optimizer]) / placement.z
    weights = [sum(found.line.numel(name) for name in layer.reads) * each for layer in found.line.layers.calls]
    flight = min(placement.pipe, len(found.rows))
    return [own + flight * stash for own, stash in zip(weights, stashes, strict=True)]
