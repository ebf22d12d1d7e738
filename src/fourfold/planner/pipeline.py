"""A pipelined plan's forecast: the schedule's program in virtual time, with seconds and bytes of every stage.

One trace of the whole model, in which layers are told apart, gives the costs of each stage (`stage`). The program is
the one that the ranks will run; `simulate` says when, and `walk` how much a rank holds meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fourfold.hardware import Cluster
from fourfold.hardware.collectives import EFFICIENCY, Group, seconds, send
from fourfold.ledger import Ledger
from fourfold.placement.pipe.part import Part
from fourfold.placement.precision import Precision
from fourfold.placement.traffic import Pass
from fourfold.plan import Plan
from fourfold.planner import bytes as traffic
from fourfold.planner import clock, memory
from fourfold.planner.clock import Assumptions
from fourfold.planner.line import Line
from fourfold.planner.parcels import of_stage, parcels
from fourfold.planner.stage import Stage, stages
from fourfold.planner.tap import span
from fourfold.planner.tape import Tape
from fourfold.planner.traces import Traces
from fourfold.planner.walk import PASSES, High, walk
from fourfold.schedule import Action, Program, Timeline, simulate
from fourfold.schedule.action import ACTIVATION, BACKWARD_WEIGHT, FORWARD, GRADIENT_SUM, MOVE
from fourfold.schedule.laid import homes, kept, program_of, uses
from fourfold.wire import formulas


@dataclass(frozen=True)
class Rank:
    """What one worker of a pipeline is forecast to hold and send.

    Attributes:
        worker: its place on the pipe axis.
        stages: those it holds.
        ledger: bytes a flow, and memory by category at its highest moment.
        when: what it is doing then.
        busy: seconds in which it computes.
    """

    worker: int
    stages: tuple[int, ...]
    ledger: Ledger
    when: str
    busy: float

    @property
    def peak(self) -> int:
        """Bytes at the highest moment."""
        return sum(self.ledger.memory.values())


@dataclass
class Pipeline:
    """One pipelined plan on a cluster.

    Attributes:
        line: the model's layers.
        tapes: by rows of a micro-batch, traces that tell layers apart.
        rows: of every micro-batch, on this replica.
        workspace: of each tape's operators.
        types, dtype: of elements, and of products as a cluster names it.
        local: shapes of the weights that are cut over x and y.
        states: tensors of a weight's size that the optimizer keeps.
        places: of the blocks among the layers.
        reached: blocks that backward comes to.
    """

    traces: Traces
    cluster: Cluster
    plan: Plan
    line: Line
    tapes: Mapping[int, Tape]
    rows: Sequence[int]
    workspace: Mapping[int, Sequence[int]]
    types: Precision
    dtype: str
    local: Mapping[str, Sequence[int]]
    states: int
    places: Mapping[str, int]
    reached: frozenset[str]
    known: dict[Any, list[Stage]] = field(default_factory=dict)
    """Stages by bounds, rows and assumptions, for plans that differ in their schedule to share."""
    _dealt: dict[Any, tuple[memory.Parcel, ...]] = field(init=False, default_factory=dict)
    _timelines: dict[Assumptions, Timeline] = field(init=False, default_factory=dict)

    @cached_property
    def program(self) -> Program:
        """What the ranks run.

        Raises:
            ScheduleError: the schedule cannot be laid so.
        """
        return program_of(self.plan)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where it is cut."""
        return self.line.bounds(self.plan.placement.cut, len(homes(self.program)))

    @cached_property
    def parts(self) -> list[Part]:
        """Every worker's."""
        where = homes(self.program)
        return [self.line.part(self.bounds, where, worker) for worker in range(self.program.workers)]

    def stage(self, assume: Assumptions) -> dict[int, list[Stage]]:
        """By rows, what every stage costs."""
        return {rows: self.cut(self.bounds, rows, assume) for rows in self.tapes}

    def cut(self, bounds: tuple[int, ...], rows: int, assume: Assumptions = clock.LIKELY) -> list[Stage]:
        """What stages between other bounds would cost."""
        key = (bounds, rows, assume)
        if key not in self.known:
            tape, whole = self.tapes[rows], self.plan.placement.z > 1
            costs = clock.operator_seconds(tape, self.cluster, self.dtype, assume)
            self.known[key] = stages(tape, self.line, bounds, costs, self.workspace[rows], whole)
        return self.known[key]

    def timeline(self, assume: Assumptions) -> Timeline:
        """When everything happens."""
        if assume not in self._timelines:
            self._timelines[assume] = simulate(self.program, self._costs(assume))
        return self._timelines[assume]

    def _costs(self, assume: Assumptions) -> list[float]:
        """Seconds of every action."""
        table = self.stage(assume)
        passes = {
            rows: [self._passes(stage, rows, number, assume) for number, stage in enumerate(listed)]
            for rows, listed in table.items()
        }
        each = [passes[rows] for rows in self.rows]
        kinds = {kind: place for place, kind in enumerate(PASSES)}
        moves = {
            (source, to, nbytes): self._sends(nbytes, source, to, assume)
            for source, to, nbytes in {one[:3] for one in self._moves.values()}
        }
        costs = []
        for number, action in enumerate(self.program.actions):
            if action.kind in kinds:
                costs.append(each[action.microbatches.start][action.stage][kinds[action.kind]])
            else:
                costs.append(moves[self._moves[number][:3]] if action.kind == MOVE else 0.0)
        return costs

    def _passes(self, stage: Stage, rows: int, number: int, assume: Assumptions) -> tuple[float, float, float, float]:
        """Seconds of the four kinds of pass, with what the stage's own grid says and gathers in them."""
        said = [sum(self._says(self.tapes[rows], message, assume) for message in one) for one in stage.messages]
        gather, scatter = self._travels(number, assume)
        beside = max if self.plan.placement.overlap else (lambda one, other: one + other)
        forward = beside(stage.forward, gather) + said[0]
        by_input = beside(stage.backward - stage.weight, gather) + said[1]
        return forward, beside(stage.backward, gather + scatter) + said[1], by_input, beside(stage.weight, scatter)

    def _says(self, tape: Tape, number: int, assume: Assumptions) -> float:
        message, sizes = tape.messages[number], self.plan.placement.axes()
        return self._takes(message.axis, message.op, message.whole(sizes), assume)

    def _takes(self, axis: str, op: str, nbytes: float, assume: Assumptions) -> float:
        group = Group.of(self.cluster, *span(axis, self.plan.placement.axes()))
        return seconds(op, nbytes, self.cluster, group) / assume.link

    def _travels(self, stage: int, assume: Assumptions) -> tuple[float, float]:
        """Seconds of gathering a stage's weights over z, and of scattering its gradients, in one pass."""
        shard = self.plan.placement.shard
        units = self._units(stage) if self.plan.placement.z > 1 else ()
        gather = sum(
            self._takes("z", "all_gather", one.layout.gathered * one.message, assume)
            for one in units
            if shard == "parameters"
        )
        scatter = sum(
            self._takes("z", "reduce_scatter", one.layout.trained * one.layout.parts * one.message, assume)
            for one in units
            if shard != "optimizer"
        )
        return gather, scatter

    def _sends(self, nbytes: int, source: int, to: int, assume: Assumptions) -> float:
        """All ranks of a stage send at once, and share a node's ports."""
        _, stride = span("pipe", self.plan.placement.axes())
        devices = self.cluster.devices_per_node
        if source * stride // devices == to * stride // devices:
            link, bandwidth = self.cluster.intra, self.cluster.intra.among(2)
        else:
            link, bandwidth = self.cluster.inter, self.cluster.node_bandwidth / min(stride, devices)
        return (link.call + send(nbytes, link.latency, EFFICIENCY * bandwidth)) / assume.link

    @cached_property
    def _moves(self) -> dict[int, tuple[int, int, int, str]]:
        """By number of the action: who sends, to whom, how many bytes, of what kind of traffic."""
        table = self.stage(clock.LIKELY)
        each = [[(one.sent, one.returned) for one in table[rows]] for rows in self.rows]
        found = {}
        for number, action in enumerate(self.program.actions):
            if action.source is not None:
                kind, stage, microbatch, _ = action.reads[0]
                sums = kind == GRADIENT_SUM
                nbytes = formulas.message([]) if sums else each[microbatch][stage][kind != ACTIVATION]
                found[number] = action.source, action.worker, nbytes, "gradient" if sums else kind
        return found

    @cached_property
    def _own(self) -> list[list[Action]]:
        """Every worker's passes, in their order."""
        found: list[list[Action]] = [[] for _ in range(self.program.workers)]
        for action in self.program.actions:
            if action.kind in PASSES:
                found[action.worker].append(action)
        return found

    # ---- ranks

    @cached_property
    def ranks(self) -> list[Rank]:
        """Every worker's forecast, in the first replica."""
        timeline = self.timeline(clock.LIKELY)
        table = self.stage(clock.LIKELY)
        highs = walk(timeline, lambda stage, microbatch: table[self.rows[microbatch]][stage])
        return [
            Rank(part.worker, part.stages, self._ledger(part, high), high.when, timeline.busy(part.worker))
            for part, high in zip(self.parts, highs, strict=True)
        ]

    def _units(self, stage: int, part: Part | None = None) -> tuple[memory.Parcel, ...]:
        """Those whose weights a stage is the first to read: on a worker, or of all stages."""
        key = (stage, None if part is None else part.worker)
        if key not in self._dealt:
            placement = self.plan.placement
            apart = self.types.upcast or (placement.shard == "parameters" and placement.z > 1)
            grid = placement.grid if placement.grid.cuts_features else None
            itemsize = self.types.message.itemsize
            held = self.parts[0].reads[stage] if part is None else part.held(stage)
            listed = of_stage(
                self.traces.units(0, apart, itemsize, grid), held, placement.message, itemsize, apart=apart
            )
            self._dealt[key] = parcels(listed, dict(self.places), placement, self.types, self.reached, self.local)
        return self._dealt[key]

    def held(self, part: Part) -> list[memory.Parcel]:
        """All units of a worker."""
        return [one for stage in part.stages for one in self._units(stage, part)]

    def shared(self, part: Part) -> dict[str, int]:
        """Bytes of the gradients that a worker sums with others."""
        return {
            slot.name: slot.segment * one.master
            for one in self.held(part)
            for slot in one.layout.trained_slots
            if slot.name in part.shared
        }

    def _ledger(self, part: Part, high: High) -> Ledger:
        ledger = Ledger(rank=part.worker)
        ledger.memory = self._memory(part, high)
        units = self.held(part)
        if units:
            self._count(ledger, part, units)
        sizes = self.plan.placement.axes()
        table = self.stage(clock.LIKELY)
        for action in self._own[part.worker]:
            rows = self.rows[action.microbatches.start]
            said = table[rows][action.stage].messages if action.kind != BACKWARD_WEIGHT else ((), ())
            for number in said[action.kind != FORWARD]:
                message = self.tapes[rows].messages[number]
                ledger.send(message.axis, message.kind, message.op, message.sent(sizes))
        for name, nbytes in self.shared(part).items():
            for _ in part.shared[name][1:]:
                ledger.send("pipe", "gradient", "send", formulas.send(nbytes))
                ledger.send("pipe", "gradient", "receive", 0)  # counted where it is handed over
        for source, _, nbytes, kind in self._moves.values():
            if source == part.worker:
                ledger.send("pipe", kind, "send", nbytes)
        return ledger

    def _count(self, ledger: Ledger, part: Part, units: Sequence[memory.Parcel]) -> None:
        """What travels over z and data."""
        keeps = kept(self.plan, self.program, part.worker)
        passes = [Pass(*use) for use in uses(self.program, part.worker, keeps)]
        reads = [part.readers(slot.name for slot in one.layout.slots) for one in units]
        about: dict[str, Any] = {"passes": passes, "stages": reads, "ends": part.ends}
        traffic.count(ledger, self.plan, units, (), len(self.rows), **about)

    def _memory(self, part: Part, high: High) -> dict[str, int]:
        tape, units = self.tapes[self.rows[0]], self.held(part)
        trained = sum(one.layout.trained * one.master for one in units)
        found: dict[str, int] = dict.fromkeys(memory.MEMORY, 0)
        found[memory.PARAMETERS] = sum(one.at_rest for one in units)
        found[memory.GRADIENTS] = trained + high.rise.gradients
        found[memory.OPTIMIZER] = self.states * trained
        found[memory.ACTIVATIONS] = high.held + high.rise.activations
        found[memory.BUFFERS] = high.boundary + self._travelling(units)
        found[memory.WORKSPACE] = high.rise.workspace
        found[memory.OTHER] = tape.buffer_bytes + tape.batch_bytes + self.cluster.device.reserved
        return found

    def _travelling(self, units: Sequence[memory.Parcel]) -> int:
        """Bytes of gathered weights and messages of gradients: of the largest unit that runs and the one behind it."""
        full = sorted((one.full + one.staging for one in units if one.transient), reverse=True)
        message = max((one.packed for one in units), default=0)
        return sum(full[: 2 if self.plan.placement.overlap else 1]) + message * (1 + self.cluster.is_cpu)

    # ---- the step

    def timing(self, rank: Rank, assume: Assumptions) -> clock.Timing:
        """A step, as this rank spends it: the slowest update and the slowest sums count for all."""
        timeline = self.timeline(assume)
        busy = timeline.busy(rank.worker)
        found = clock.Timing(compute=busy, exposed={"bubble": timeline.makespan - busy})
        placement = self.plan.placement
        per = clock.UPDATE_BYTES if self.states == 2 else 3 + 2 * self.states
        bandwidth = self.cluster.device.memory_bandwidth * assume.memory
        tails: dict[str, float] = dict.fromkeys(("pipe", "data", "z"), 0.0)
        for part in self.parts:
            units = self.held(part)
            sizes = [one.layout.trained * one.master for one in units]
            found.update = max(found.update, sum(sizes) * per / bandwidth)
            others = [
                self._sends(nbytes, part.worker, other, assume)
                for name, nbytes in self.shared(part).items()
                for other in part.shared[name]
                if other != part.worker
            ]
            tails["pipe"] = max(tails["pipe"], sum(others))
            tails["data"] = max(tails["data"], sum(self._takes("data", "all_reduce", one, assume) for one in sizes))
            whole = [one.layout.trained * one.layout.parts * one.message for one in units if one.layout.parts > 1]
            ops = {"optimizer": ("reduce_scatter", "all_gather"), "gradients": ("all_gather",)}.get(placement.shard, ())
            tails["z"] = max(tails["z"], sum(self._takes("z", op, one, assume) for op in ops for one in whole))
        found.exposed |= {axis: spent for axis, spent in tails.items() if spent}
        return found
