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
from fourfold.placement.arena import Arena, Fill
from fourfold.placement.block import Block, Neighbours
from fourfold.placement.departures import Departures
from fourfold.placement.layout import Layout
from fourfold.placement.membership import Group, Members, members
from fourfold.placement.piece import Piece
from fourfold.placement.precision import Precision
from fourfold.placement.reach import reached
from fourfold.placement.refusals import reads_explained, refuse
from fourfold.placement.seats import Seats, room
from fourfold.placement.state import answer_state_dict, write_loaded_state
from fourfold.placement.tensor import trial
from fourfold.placement.tensor.kernels import Choice, Kernels
from fourfold.placement.tensor.rehearsal import Loss, Stage
from fourfold.placement.tensor.split import Split, rehearsed
from fourfold.placement.tensor.tuning import Tuning
from fourfold.placement.unit import Unit
from fourfold.plan import Codec, Events, Placement
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
    ):
        """Use `place`."""
        self.model, self.anatomy, self.mesh, self.options = model, anatomy, mesh, options
        self.units, self.events = units, events
        self.departures = Departures(units, events, overlap=options.overlap)
        self.blocks: list[Block] = []
        self.shards = [shard for unit in units for shard in _shards(unit)]
        self.seats = _seats(units, mesh)
        self._outer: list[Unit] = []
        self._inner: list[Unit] = []
        self._reached: list[Unit] = []
        self.split = split
        self.statistics: batch_norm.Scope | None = None
        narrow = units[0].arena.precision.compute.itemsize < 4  # torch's own wants weights in float32 then
        if options.parts > 1 or options.recompute == "full" or narrow:
            self.statistics = batch_norm.synchronise(model, self._scope)

    # ---- a step

    def abandon(self) -> None:
        """The last step did not end: nothing of its gradients may reach the next."""
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

    def begin(self) -> None:
        """A new step: gradients are empty."""
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
    def forward(self, position: randomness.Position | None, *, counts: bool = True) -> Iterator[None]:
        """The scope of one micro-batch's forward (or of an evaluation, without a position).

        Args:
            position: of the rows being computed.
            counts: these rows belong to the micro-batch; a rank without rows computes one that does not.
        """
        if self.statistics is not None:
            self.statistics.counts = counts
        for unit in self._outer:
            unit.start()
        if self._inner and self.options.overlap:
            self._inner[0].start()
        for unit in self._outer:
            unit.ready()
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

    def backward(self, loss: Tensor, scale: float, *, last: bool) -> None:
        """Backward of one micro-batch's loss times `scale`; on the step's last one the gradients become ready."""
        self.departures.open(last=last)
        with reads_explained(self.options.shard):
            loss.backward(torch.full_like(loss, scale))
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

    def forecast(self, ledger: Ledger, microbatches: int, batches: Sequence[Mapping[str, Tensor]] = ()) -> None:
        """Add the bytes of one step, by formula.

        Args:
            ledger: to add to.
            microbatches: in a step.
            batches: this rank's rows of each, on which the traffic of cut features depends.

        Exact where every block runs in every micro-batch; where the model leaves blocks out (LayerDrop, on all ranks
        alike), at most this: gathers of what is left out may not happen. All other traffic is the same.
        """
        parts = self.mesh["z"].size
        itemsize = torch.empty(0, dtype=self.units[0].arena.precision.message).element_size()
        kept = self._inner[-1] if self._inner else None
        shipments = [
            traffic.Shipment(
                unit.arena.layout, last=unit is kept, outer=unit in self._outer, reached=unit in self._reached
            )
            for unit in self.units
            if unit.axis.size == parts
        ]
        about: dict[str, Any] = {"shard": self.options.shard, "microbatches": microbatches, "ledger": ledger}
        traffic.weights(shipments, parts, itemsize=itemsize, **about)
        traffic.gradients(shipments, parts, payload=self.units[0].payload, **about)
        if self.split is not None:
            self.split.forecast(ledger, batches, recompute=self.options.recompute == "full")
        if self.statistics is not None:
            modules = dict(self.model.named_modules())
            norms = [norm for norm in self.anatomy.batch_norms if batch_norm.takes_statistics(modules[norm.module])]
            twice = self.anatomy.blocks if self.options.recompute == "full" else ()
            axis = self.statistics.axis
            trained = [name for name, weight in self.model.named_parameters() if weight.requires_grad]
            sent = traffic.exchanges(norms, axis.size, recomputed=twice, trained=trained)
            traffic.statistics(sent, axis, microbatches=microbatches, ledger=ledger)

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
            if self.split is not None:
                parameters = {name: parameter for unit in self.units for name, parameter in unit.parameters.items()}
                stack.enter_context(self.split.whole(parameters))
            yield self.model

    def logical(self, flat: Callable[[Unit], Tensor]) -> dict[str, Tensor]:
        """Whole logical tensors by name, on every rank, of `flat(unit)`: [layout.size or layout.trained] each.

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
        return whole

    def compile(self, **settings: Any) -> None:
        """Compile what is inside every block (`torch.compile`); gathering and freeing stay outside of the graphs."""
        for block in self.blocks:
            block.compile(**settings)


def place(
    model: nn.Module,
    anatomy: Anatomy,
    mesh: Mesh,
    options: Placement,
    *,
    fill: Fill,
    group: Group,
    events: Events,
    device: torch.device,
    codec: Codec | None = None,
    seats: bool = False,
    loss: Loss | None = None,
    example: Mapping[str, Tensor] | None = None,
) -> Placed:
    """Give a plain model arenas for its weights, in place.

    Args:
        model: on the meta device, or with weights (which `fill` then reads).
        anatomy: of the model.
        mesh: this rank's.
        options: the placement.
        fill: source of logical weights.
        group: sorts trained parameters for the optimizer.
        events: told when a unit's gradient is ready.
        device: where everything goes.
        codec: the form in which gradients cross over z.
        seats: numbers of every rank travel behind the gradient that leaves last, which the rule sums over all ranks.
        loss, example: by which a model whose features are cut is rehearsed.
    """
    refuse(model, anatomy, ranks=options.parts)
    precision = Precision.of(options.precision, device)
    split = None
    if options.grid.cuts_features:
        stage = _stage(model, anatomy, precision, loss, example)
        split = rehearsed(stage, anatomy, mesh, options.grid, _tuning(options))
        trial.attempt(split, model, stage.loss)
    sharded = options.shard == "parameters" and mesh["z"].size > 1
    apart, itemsize = sharded or precision.upcast, precision.message.itemsize
    still = frozenset() if split is None else split.assembly.still
    sorted_ = members(model, anatomy, group, bucket=options.message, apart=apart, itemsize=itemsize, still=still)
    units: list[Unit] = []
    for index, (member, layout) in enumerate(zip(sorted_, _layouts(sorted_, mesh, split), strict=True)):
        leaves_last = layout.trained > 0 and not any(unit.arena.layout.trained for unit in units)
        passengers = room(options.parts) if seats and leaves_last else 0
        axis, resident = mesh.over() if member.still else mesh["z"], member.still or not sharded
        arena = Arena(layout, precision, axis.index, resident=resident, device=device, passengers=passengers)
        arena.fill(fill)
        hold = options.shard == "optimizer"
        units.append(Unit(index, member.name, arena, axis, member.owners, hold=hold, codec=codec))
    for unit in units:
        unit.install()
    _place_buffers(model, precision, device)
    if split is not None:
        split.install(model)
    placed = Placed(model, anatomy, mesh, options, units, events, split)
    _wrap_blocks(placed, sorted_)
    answer_state_dict(model, units, split)
    write_loaded_state(model, units, split)
    return placed


def _stage(
    model: nn.Module, anatomy: Anatomy, precision: Precision, loss: Loss | None, example: Mapping[str, Tensor] | None
) -> Stage:
    assert loss is not None and example is not None
    return Stage.of(model, loss, example, anatomy.traced, precision.compute)


def _tuning(options: Placement) -> Tuning:
    return Tuning(options.overlap, options.chunks, Kernels() if options.kernels == "tuned" else None)


def _layouts(sorted_: Sequence[Members], mesh: Mesh, split: Split | None) -> list[Layout]:
    blocks = {} if split is None else split.assembly.blocks()
    return [Layout.of(member.weights, 1 if member.still else mesh["z"].size, blocks) for member in sorted_]


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


def _place_buffers(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Buffers are replicated, and shared ones stay shared; in fp64 the floating ones are widened."""
    placed: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            wide = precision.compute == torch.float64 and buffer.is_floating_point()
            if id(buffer) not in placed:
                placed[id(buffer)] = buffer.to(device=device, dtype=torch.float64 if wide else buffer.dtype)
            module._buffers[name] = placed[id(buffer)]


def _wrap_blocks(placed: Placed, sorted_: list[Members]) -> None:
    """Take over the blocks' forwards; what has no block is brought in around the whole forward."""
    modules = dict(placed.model.named_modules())
    homes: dict[str, tuple[Unit, bool, bool]] = {}
    trained = (name for name, weight in placed.model.named_parameters() if weight.requires_grad)
    comes_to = reached(placed.anatomy, trained)
    for unit, member in zip(placed.units, sorted_, strict=True):
        if member.outer:
            placed._outer.append(unit)
        if member.blocks:
            placed._inner.append(unit)
        if not comes_to.isdisjoint(member.blocks):
            placed._reached.append(unit)
        for path in member.blocks:
            homes[path] = unit, path == member.blocks[0], path == member.blocks[-1]
    for path in placed.anatomy.blocks:
        # A block all of whose weights are used outside, too, has no unit of its own: it brings none in, and frees none.
        unit, first, last = homes.get(path) or (placed._outer[0], False, False)
        block = Block(
            path,
            modules[path],
            unit,
            placed.departures,
            recompute=placed.options.recompute,
            random=bool(placed.anatomy.dropouts),
            torchs=bool(placed.anatomy.random_calls),
            first=first,
            last=last,
        )
        if unit in placed._inner:
            block.neighbours = _neighbours(placed, unit)
            block.keep = unit is placed._inner[-1]
        placed.blocks.append(block)


def _neighbours(placed: Placed, unit: Unit) -> Neighbours:
    inner, ahead = placed._inner, placed.options.overlap
    at = inner.index(unit)
    return Neighbours(
        before=inner[at - 1] if ahead and at > 0 and inner[at - 1] in placed._reached else None,
        after=inner[at + 1] if ahead and at + 1 < len(inner) else None,
    )
