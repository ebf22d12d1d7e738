"""A plain model becomes a placed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fourfold import randomness
from fourfold.anatomy import Anatomy
from fourfold.ledger import Ledger
from fourfold.placement import batch_norm, norm, traffic
from fourfold.placement.block import Block
from fourfold.placement.departures import Departures
from fourfold.placement.piece import Piece
from fourfold.placement.pipe.deferred import Deferral, Undone
from fourfold.placement.pipe.dry import sent
from fourfold.placement.pipe.gathering import filled, spread, spread_buffers
from fourfold.placement.pipe.line import Line
from fourfold.placement.pipe.part import Part
from fourfold.placement.refusals import reads_explained
from fourfold.placement.seats import Seats
from fourfold.placement.tensor.between import Between
from fourfold.placement.tensor.kernels import Choice
from fourfold.placement.tensor.split import Split, Staged
from fourfold.placement.unit import Unit
from fourfold.plan import Events, Placement
from fourfold.wire import Mesh


@dataclass(frozen=True)
class Shard:
    """One flat tensor that the optimizer updates: this rank's rows of one unit's weights of one group.

    Attributes:
        parameter: flat [numel] master values; its `.grad` is the summed gradient.
        group: optimizer group.
        pieces: the logical boxes in it.
    """

    parameter: nn.Parameter
    group: str
    pieces: tuple[Piece, ...]


class Placed:
    """A model whose weights live in arenas, and the verbs of one step on it."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        mesh: Mesh,
        options: Placement,
        units: list[Unit],
        events: Events,
        split: Split | None = None,
        part: Part | None = None,
    ):
        """Use `place`."""
        self.model, self.anatomy, self.mesh, self.options = model, anatomy, mesh, options
        self.part = part
        self.line: Line | None = None
        self.deferral = Deferral()
        self.units, self.events = units, events
        self.departures = Departures(units, events, overlap=options.overlap)
        self.blocks: list[Block] = []
        self.shards = [shard for unit in units for shard in _shards(unit)]
        self.seats = _seats(units, mesh)
        self._kept: set[int] = set()
        # What lies outside of the blocks, what holds them, and where backward comes to.
        self.outer: list[Unit] = []
        self.inner: list[Unit] = []
        self.reached: list[Unit] = []
        self.split = split
        self.statistics: batch_norm.Scope | None = None
        narrow = units[0].arena.precision.compute.itemsize < 4  # torch's own wants weights in float32 then
        if options.parts > 1 or options.recompute == "full" or narrow:
            self.statistics = batch_norm.synchronise(model, self._scope)

    # ---- a step

    def abandon(self) -> None:
        """The last step did not end: nothing of its gradients may reach the next."""
        for unit in self.units:
            unit.pins = 0
        self._kept.clear()
        self.departures.abandon()

    @property
    def kernels(self) -> list[Choice]:
        """How cut linears multiply, shape by shape, if kernels are tuned: chosen in the first step."""
        tuned = None if self.split is None else self.split.tuning.kernels
        return [] if tuned is None else tuned.record()

    @property
    def untried(self) -> str:
        """Why a model whose features are cut was not tried on numbers, in words; empty if it was, or is not cut."""
        return "" if self.split is None else self.split.untried

    @property
    def turning(self) -> Unit | None:
        """The unit of the model's last block, if it is here: backward begins with it."""
        return self.inner[-1] if self.inner and (self.part is None or self.part.ends) else None

    def begin(self) -> None:
        """A new step: gradients are empty."""
        self.departures.begin()
        for unit in self.units:
            unit.begin()

    def look_at(self, inputs: Mapping[str, Tensor]) -> None:
        """Before the forward of a micro-batch: rehearse again where its shapes lead the model's code another way.

        Raises:
            PlacementError: features are cut, and the model would not compute what the plain one does.
        """
        if self.split is not None:
            with self.mesh.ledger.outside_of_steps():
                self.split.look_at(inputs)

    @contextmanager
    def kept(self, stage: int, *, keeps: bool, forward: bool) -> Iterator[None]:
        """Around a pass through a stage: gathered weights stay for the next one.

        Args:
            stage: which.
            keeps: the next pass is of the same kind and stage.
            forward: else a backward.
        """
        units = [unit for unit in self.inner if stage in unit.stages]
        for unit in units if keeps and stage not in self._kept else ():
            unit.pins += 1
        yield
        if keeps:
            self._kept.add(stage)
        elif stage in self._kept:
            self._kept.discard(stage)
            for unit in units:
                unit.pins -= 1
                if not (forward and unit is self.turning):
                    unit.free()

    @contextmanager
    def forward(self, position: randomness.Position | None, *, counts: bool = True, stage: int = 0) -> Iterator[None]:
        """The scope of one micro-batch's forward (or of an evaluation, without a position).

        Args:
            position: of the rows being computed.
            counts: these rows belong to the micro-batch; a rank without rows computes one that does not.
            stage: the pipeline stage that runs.
        """
        if self.statistics is not None:
            self.statistics.counts = counts
        outer = [unit for unit in self.outer if stage in unit.stages]
        for unit in outer:
            unit.start()
        first = next((unit for unit in self.inner if stage in unit.stages), None)
        if first is not None and self.options.overlap:
            first.start()
        for unit in outer:
            unit.ready()
        if torch.is_grad_enabled():
            self.departures.enter(stage, 1)
        with ExitStack() as stack, reads_explained(self.options.shard):
            if self.split is not None:
                stack.enter_context(self.split.scope.around())
            if position is not None and self.anatomy.dropouts:
                stack.enter_context(randomness.at(self._located(position)))
                stack.enter_context(randomness.inside(self.model, ""))
            yield
        if not torch.is_grad_enabled():
            self.free()

    def _located(self, position: randomness.Position) -> randomness.Position:
        position = position._replace(layouts=self.anatomy.layouts)
        if self.split is None:
            return position
        return position._replace(cuts=self.split.dropped, windows=self.split.windows)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], *, stage: int = 0, last: bool) -> None:
        """Backward of one micro-batch through a stage; on its last one the gradients become ready.

        Args:
            outputs: what the stage's forward gave: the loss, or what crossed to the next stage.
            gradients: of each output, the step's whole loss by it.
            stage: the pipeline stage that runs.
            last: of the stage in the step.
        """
        self.departures.enter(stage, -1)
        self.departures.open(stage, last=last)
        with reads_explained(self.options.shard):
            torch.autograd.backward(outputs, gradients)
        self.departures.close()

    def backward_input(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], *, stage: int = 0) -> list[Undone]:
        """The half of `backward` that the stage before waits for.

        Returns:
            What `backward_weight` is to do.
        """
        undone: list[Undone] = []
        self.departures.enter(stage, -1)
        self.departures.open(stage, last=False, leaves=False)
        self.deferral.taken = undone
        try:
            with reads_explained(self.options.shard):
                torch.autograd.backward(outputs, gradients)
        finally:
            self.deferral.taken = None
        self.departures.close()
        return undone

    def backward_weight(self, undone: Sequence[Undone], *, stage: int = 0, last: bool) -> None:
        """The other half; on a stage's last one the gradients become ready."""
        self.departures.open(stage, last=last)
        self.deferral.run(undone)
        self.departures.close()

    def free(self) -> None:
        """Every unit that is only gathered for use is freed."""
        for unit in self.units:
            unit.free()

    def refresh(self) -> None:
        """The shards have changed."""
        for unit in self.units:
            unit.refresh()

    def settle(self) -> None:
        """The gathers that `refresh` began have arrived; the next step's forward waits for them otherwise."""
        for unit in self.units:
            unit.settle_refresh()

    # ---- what a step needs to know

    def norm_share(self, order: float) -> float:
        """This rank's share of the gradient norm."""
        return norm.partial((segment for unit in self.units for segment in unit.arena.segments()), order)

    def forecast(
        self, ledger: Ledger, passes: Sequence[traffic.Pass], batches: Sequence[Mapping[str, Tensor]] = ()
    ) -> None:
        """Add the bytes of one step, by formula.

        Args:
            ledger: to add to.
            passes: of this rank in a step, in their order.
            batches: this rank's rows of each, on which the traffic of cut features depends.

        Exact where every block runs in every micro-batch; where the model leaves blocks out (LayerDrop, on all ranks
        alike), at most this: gathers of what is left out may not happen. All other traffic is the same.
        """
        parts = self.mesh["z"].size
        itemsize = torch.empty(0, dtype=self.units[0].arena.precision.message).element_size()
        shipments = [
            traffic.Shipment(
                unit.arena.layout,
                last=unit is self.turning,
                outer=unit in self.outer,
                reached=unit in self.reached,
                stages=unit.stages,
            )
            for unit in self.units
            if unit.axis.size == parts
        ]
        about: dict[str, Any] = {"shard": self.options.shard, "passes": passes, "ledger": ledger}
        traffic.weights(shipments, parts, itemsize=itemsize, **about)
        traffic.gradients(shipments, parts, payload=self.units[0].payload, **about)
        if self.split is not None:
            recompute, staged = self.options.recompute == "full", None if self.part is None else self._staged
            self.split.forecast(ledger, batches, recompute=recompute, staged=staged)
        if self.statistics is not None:
            modules = dict(self.model.named_modules())
            norms = [norm for norm in self.anatomy.batch_norms if batch_norm.takes_statistics(modules[norm.module])]
            twice = self.anatomy.blocks if self.options.recompute == "full" else ()
            axis = self.statistics.axis
            trained = [name for name, weight in self.model.named_parameters() if weight.requires_grad]
            sent = traffic.exchanges(norms, axis.size, recomputed=twice, trained=trained)
            microbatches = sum(one.forward for one in passes)
            traffic.statistics(sent, axis, microbatches=microbatches, ledger=ledger)

    def _staged(self, model: nn.Module, between: Between) -> Staged:
        """Runs a dry twin of the split model stage by stage; what this rank's stages send is told."""
        part = self.part
        assert part is not None
        line = Line(model, part.layers, part.bounds, self.anatomy.blocks, between)
        return lambda whole, ledger: sent(line, whole, ledger, part.stages)

    def _scope(self) -> batch_norm.Scope:
        def again() -> bool:
            return self.departures.active and self.options.recompute == "full"

        return batch_norm.Scope(self.mesh.over("z", "data"), again)

    # ---- the logical view

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The whole model on every rank, for reading. All ranks enter together."""
        with ExitStack() as stack:
            for unit in self.units:
                stack.enter_context(unit.pinned())
            if self.part is not None:
                elsewhere = self.part.weights.keys() - {name for unit in self.units for name in unit.parameters}
                whole = self.logical(lambda unit: unit.arena.shard)
                spread_buffers(self.model, self.part, self.mesh["pipe"])
                stack.enter_context(filled(self.model, {name: whole[name] for name in elsewhere}))
            if self.split is not None:
                parameters = {name: parameter for unit in self.units for name, parameter in unit.parameters.items()}
                stack.enter_context(self.split.whole(parameters))
            yield self.model

    def logical(self, flat: Callable[[Unit], Tensor], *, trained: bool = False) -> dict[str, Tensor]:
        """Whole logical tensors by name, on every rank, of `flat(unit)`: [layout.size], or if `trained` its prefix.

        All ranks call together. Counted as control traffic.
        """
        whole: dict[str, Tensor] = {}
        for unit in self.units:
            layout = unit.arena.layout
            mine = flat(unit)
            staged = torch.empty(layout.parts, mine.numel(), dtype=mine.dtype, device=mine.device)
            unit.axis.all_gather(staged.view(-1), mine.contiguous(), "control").wait()
            blocks: dict[str, Tensor] = {}
            for slot in layout.slots:
                if slot.shard_start + slot.segment <= mine.numel():
                    rows = staged[:, slot.shard_start : slot.shard_start + slot.used].reshape(-1)
                    blocks[slot.name] = rows[: slot.numel].view(slot.shape).clone()
            whole |= blocks if self.split is None else self.split.assembly.assembled(blocks)
        if self.part is None:
            return whole
        return spread(whole, self.part, self.mesh["pipe"], self.units[0].arena.precision.master, trained=trained)

    def compile(self, **settings: Any) -> None:
        """Compile what is inside every block (`torch.compile`); gathering and freeing stay outside of the graphs."""
        for block in self.blocks:
            block.compile(**settings)


def _seats(units: Sequence[Unit], mesh: Mesh) -> Seats | None:
    behind = [unit.arena.summed[unit.arena.layout.trained :] for unit in units]
    taken = next((elements for elements in behind if elements.numel()), None)
    return None if taken is None else Seats(taken, mesh.over("z", "data").index)


def _shards(unit: Unit) -> Iterator[Shard]:
    arena = unit.arena
    for group, first, last in arena.layout.groups():
        parameter = nn.Parameter(arena.shard[first:last])
        parameter.grad = arena.gradient[first:last]
        slots = [slot for slot in arena.layout.trained_slots if slot.group == group]
        held = [piece for slot in slots for piece in slot.pieces(arena.index)]
        pieces = tuple(piece._replace(start=piece.start - first) for piece in held)
        yield Shard(parameter, group, pieces)
