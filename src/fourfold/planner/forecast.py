"""What a plan would cost on a machine, and whether it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from fourfold.anatomy import Anatomy
from fourfold.hardware import Cluster
from fourfold.ledger import Ledger
from fourfold.ledger.ledger import MEMORY
from fourfold.placement.precision import Precision
from fourfold.placement.reach import reached
from fourfold.placement.refusals import NEAREST, PlacementError
from fourfold.placement.rows import share
from fourfold.placement.tensor.between import refuse_rows, way_of
from fourfold.placement.traffic import Exchange, exchanges
from fourfold.plan import Placement, Plan
from fourfold.planner import bytes as traffic
from fourfold.planner import clock, memory
from fourfold.planner.grids import nearest, obstacle
from fourfold.planner.likeness import network
from fourfold.planner.network import Network
from fourfold.planner.parcels import parcels, precision
from fourfold.planner.pipeline import Pipeline, Rank
from fourfold.planner.subject import OPTIMIZER_STATES, Subject
from fourfold.planner.tape import Tape
from fourfold.planner.tolls import AXES, Factors, Job
from fourfold.planner.trace import Settings
from fourfold.planner.traces import CutError, Traces
from fourfold.planner.units import in_bytes
from fourfold.schedule import ScheduleError
from fourfold.schedule.figures import bubble

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}
"""A cluster's name of the type that is computed in."""


class ForecastError(ValueError):
    """A plan that this machine or this batch cannot take, whatever it costs."""


class RefusedError(ForecastError):
    """Placement refuses the plan for this model or batch: a run of it would fail at its start, on any machine."""


@dataclass(frozen=True)
class Forecast:
    """One plan's forecast.

    Attributes:
        plan: which.
        ledger: bytes a flow, memory by category at the peak (the categories add up to it), and the notes "flops"
            (of this rank, a step), "step seconds", "tokens" (of all ranks, a step) and "memory peak".
        timing: the step's likely seconds, split.
        low, high: seconds of the step under the best and the worst assumptions.
        when: what the step is doing when memory is highest.
        budget: bytes that a device has for all this.
        bound: why the plan cannot be run; empty if it can.
        ranks: every worker of a pipeline; the ledger is that of the one that holds most.
    """

    plan: Plan
    ledger: Ledger
    timing: clock.Timing
    low: float
    high: float
    when: str
    budget: int
    bound: str
    ranks: tuple[Rank, ...] = ()

    @property
    def fits(self) -> bool:
        """Nothing binds."""
        return not self.bound

    @property
    def peak(self) -> int:
        """Bytes at the highest moment."""
        return sum(self.ledger.memory.values())


def forecast(subject: Subject | Traces, cluster: Cluster, plan: Plan) -> Forecast:
    """Forecast one plan for the rank with the most rows.

    Args:
        subject: what is trained; hand in `Traces` to share the traces between many plans.

    Raises:
        TraceError: the model cannot be run at all.
        ForecastError: more ranks than devices.
        RefusedError: the model or the batch cannot be cut over the grid: says where, and what fits.
    """
    traces = subject if isinstance(subject, Traces) else Traces(subject)
    if plan.world > cluster.world:
        needed = f"{plan.world} device{'s'[: plan.world > 1]}"
        raise ForecastError(f"the plan ({plan}) needs {needed}, and the machine has {cluster.world}")
    placement = plan.placement
    microbatches = getattr(plan.schedule.options, "microbatches", 1)
    try:
        refuse_rows(placement, traces.subject.rows, microbatches)
    except PlacementError as error:
        raise RefusedError(str(error)) from error
    types = precision(placement, cluster)
    if placement.pipe > 1:
        return _pipelined(traces, cluster, plan)
    tapes, settings, local = _tapes(traces, plan, str(types.compute).removeprefix("torch."), microbatches)
    tape = tapes[0]
    units = _units(traces, tape, settings, placement, types, local)
    states = OPTIMIZER_STATES[traces.subject.optimizer]
    account = memory.Simulation(
        memory.Job(
            tape=tape,
            workspace=traces.workspace(settings) if cluster.is_cpu else [0] * len(tape.operators),
            parcels=units,
            states=states,
            microbatches=microbatches,
            overlap=placement.overlap,
            receive=1 if cluster.is_cpu else 0,
            extra=tape.buffer_bytes + tape.batch_bytes,
            sizes=placement.axes(),
        )
    ).run()
    account.peak[memory.OTHER] += cluster.device.reserved
    ledger = Ledger(memory={category: account.peak[category] for category in MEMORY})
    told = _exchanges(traces.anatomy, tape, placement)
    traffic.features(ledger, plan, tapes)
    traffic.count(ledger, plan, units, told, microbatches)
    where = (tape, units, placement, cluster)
    about: dict[str, Any] = {"dtype": PRECISIONS[settings.dtype], "microbatches": microbatches, "states": states}
    likely, low, high = (
        clock.Clock(*where, **about, assume=assume, exchanges=told).run()
        for assume in (clock.LIKELY, clock.BEST, clock.WORST)
    )
    ledger.notes = {
        "flops": float(clock.flops(tape) * microbatches),
        "step seconds": likely.total,
        "tokens": float(traces.subject.rows * traces.subject.tokens_per_row),
        "memory peak": float(sum(ledger.memory.values())),
    }
    bound = _bound(ledger, cluster, plan, traces.subject, microbatches)
    return Forecast(plan, ledger, likely, low.total, high.total, account.when, cluster.device.memory, bound)


def pipeline(traces: Traces, cluster: Cluster, plan: Plan) -> Pipeline:
    """A pipelined plan, of which nothing is laid out or cut yet.

    Raises:
        RefusedError: the model is no line of layers, or cannot be cut over the grid.
    """
    types = precision(plan.placement, cluster)
    dtype = str(types.compute).removeprefix("torch.")
    microbatches = plan.schedule.options.microbatches
    try:
        line = traces.line
    except PlacementError as error:
        raise RefusedError(str(error)) from error
    paths, anatomy = line.paths, traces.anatomy
    if len(set(paths)) < len(paths):
        raise ForecastError("plan.placement.pipe: a layer of the model runs twice, which the planner cannot tell apart")
    tapes, settings, local = _tapes(traces, plan, dtype, microbatches, paths)
    each = {tape.rows: tape for tape in tapes}
    of = {rows: dataclasses.replace(settings, rows=rows) for rows in each}
    workspace = {
        rows: traces.workspace(of[rows]) if cluster.is_cpu else [0] * len(tape.operators) for rows, tape in each.items()
    }
    rows = _rows(traces, plan.placement, microbatches)
    return Pipeline(
        traces,
        cluster,
        plan,
        line,
        each,
        rows,
        workspace,
        types,
        PRECISIONS[settings.dtype],
        local,
        states=OPTIMIZER_STATES[traces.subject.optimizer],
        places={path: place for place, path in enumerate(paths) if path in anatomy.blocks},
        reached=reached(anatomy, (name for name, weight in line.weights.items() if weight.trained)),
    )


def _pipelined(traces: Traces, cluster: Cluster, plan: Plan) -> Forecast:
    found = pipeline(traces, cluster, plan)
    try:
        ranks = found.ranks
    except (PlacementError, ScheduleError) as error:
        raise RefusedError(str(error)) from error
    fullest = max(ranks, key=lambda rank: rank.peak)
    likely, low, high = (found.timing(fullest, assume) for assume in (clock.LIKELY, clock.BEST, clock.WORST))
    mine = found.stage(clock.LIKELY)
    ledger = fullest.ledger
    ledger.notes = {
        "flops": float(sum(mine[rows][stage].flops for rows in found.rows for stage in fullest.stages)),
        "step seconds": likely.total,
        "tokens": float(traces.subject.rows * traces.subject.tokens_per_row),
        "memory peak": float(fullest.peak),
        "bubble": bubble(found.timeline(clock.LIKELY)),
    }
    bound = _bound(ledger, cluster, plan, traces.subject, len(found.rows))
    budget, when = cluster.device.memory, fullest.when
    return Forecast(plan, ledger, likely, low.total, high.total, when, budget, bound, tuple(ranks))


def _tapes(
    traces: Traces, plan: Plan, dtype: str, microbatches: int, layers: tuple[str, ...] = ()
) -> tuple[list[Tape], Settings, Mapping[str, Sequence[int]]]:
    """The traces of this rank's micro-batches, the settings of the first, and shapes of weights that are cut.

    Raises:
        RefusedError: the model cannot be cut over the grid.
    """
    placement = plan.placement
    grid = way_of(placement.grid).inside(placement.grid) if placement.grid.cuts_features else None
    settings = Settings(1, dtype, placement.recompute, grid=grid, chunks=placement.chunks, layers=layers)
    each = [dataclasses.replace(settings, rows=rows) for rows in _rows(traces, placement, microbatches)]
    try:
        local = {} if grid is None else traces.local(grid)
        return [traces.tape(one) for one in each], each[0], local
    except CutError as error:
        raise RefusedError(_refusal(str(error), _near(traces, plan))) from error


def _refusal(why: str, near: Sequence[str]) -> str:
    """Placement's words under the setting that they are about; its nearest sizes, which look at one axis and one
    linear alone, give way to grids on which the whole model can be laid."""
    why = why if why.startswith("plan.") else f"plan.placement.tensor: {why}"
    return "; ".join([why.partition(NEAREST)[0], *near]) if near else why


def _near(traces: Traces, plan: Plan) -> list[str]:
    """Grids on which the model can be laid, in words: squares of the same algorithm, grids of 4d of the same world
    size; none where closed forms know none."""
    likeness, placement = network(traces), plan.placement
    if likeness is None:
        return []
    sizes, job, tensor = placement.axes(), Job(traces.subject.rows), placement.tensor
    alike = nearest(likeness, Factors(*(sizes[axis] for axis in AXES)), job)
    words = [f"nearest grids of {plan.world} that fit: {'; '.join(map(str, alike))}"] if alike else []
    if tensor is None or not hasattr(tensor.options, "q"):
        return words
    squares = [f"q {q}" for q in _squares(likeness, plan, job)]
    words = [f"4d: {one}" for one in words]
    return [f"{tensor.spelling} fits with {' or '.join(squares)}", *words] if squares else words


def _squares(likeness: Network, plan: Plan, job: Job, count: int = 2) -> list[int]:
    """Other sizes q of a plan's square algorithm, up to twice its own, that fit; those most alike first."""
    tensor = plan.placement.tensor
    assert tensor is not None
    mine, found = tensor.options.q, []
    for q in range(2, 2 * mine + 1):
        grid = tensor.module.grid(dataclasses.replace(tensor.options, q=q))
        factors = Factors(grid.x, grid.y, grid.z, plan.placement.data * grid.copies)
        if q != mine and not obstacle(likeness, factors, job):
            found.append(q)
    return sorted(found, key=lambda q: abs(log(q / mine)))[:count]


def _rows(traces: Traces, placement: Placement, microbatches: int) -> list[int]:
    """Rows of this rank's micro-batches, the first of which has the most. A rank without rows computes one."""
    parts = (share(traces.subject.rows, microbatches, placement.parts, number, 0) for number in range(microbatches))
    return [max(1, len(part)) for part in parts]


def _units(
    traces: Traces,
    tape: Tape,
    settings: Settings,
    placement: Placement,
    types: Precision,
    local: Mapping[str, Sequence[int]],
) -> tuple[memory.Parcel, ...]:
    """The placement's units on this device."""
    places = {path: place for place, path in enumerate(tape.blocks)}
    apart = types.upcast or (placement.shard == "parameters" and placement.z > 1)
    comes_to = reached(traces.anatomy, (name for name, _, trained in tape.weights if trained))
    listed = traces.units(placement.message, apart, types.message.itemsize, settings.grid)
    return parcels(listed, places, placement, types, comes_to, local)


def _exchanges(anatomy: Anatomy, tape: Tape, placement: Placement) -> list[Exchange]:
    """The statistics that a micro-batch's batch norms take over all ranks."""
    twice = anatomy.blocks if placement.recompute == "full" else ()
    trained = [name for name, _, trained in tape.weights if trained]
    return list(exchanges(anatomy.batch_norms, placement.parts, recomputed=twice, trained=trained))


def _bound(ledger: Ledger, cluster: Cluster, plan: Plan, subject: Subject, microbatches: int) -> str:
    """The constraint that rules the plan out, in words; empty if none does."""
    parts = plan.placement.parts
    if subject.rows < parts * microbatches:
        pieces = f"{parts} rank{'s'[: parts > 1]}" if parts == plan.world else f"z x data = {parts}"
        pieces += f" x {microbatches} micro-batches" if microbatches > 1 else ""
        return f"rows: {pieces}, and the batch has {subject.rows}: some ranks would compute nothing"
    return too_much(ledger, cluster)


def too_much(ledger: Ledger, cluster: Cluster) -> str:
    """What is too much for a device's memory, in words; empty if it fits."""
    need, have = sum(ledger.memory.values()), cluster.device.memory
    if need > have:
        largest = max(ledger.memory, key=lambda category: ledger.memory[category])
        return (
            f"memory: {in_bytes(need)} of {in_bytes(have)}; most of it is {largest}, {in_bytes(ledger.memory[largest])}"
        )
    return ""
