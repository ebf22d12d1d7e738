"""One unit: the weights that travel in one message, and the life of their full form.

For a block whose parameters are sharded (ZeRO-3, FSDP; Rajbhandari et al. 2020, Zhao et al. 2023) a micro-batch is

    gather -> forward -> free -> gather -> backward -> free, scatter

and every other level is the same with some of these left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fourfold.placement.arena import Arena
from fourfold.placement.freed import hide, show
from fourfold.placement.layout import FROZEN
from fourfold.placement.refusals import PlacementError
from fourfold.plan import Codec
from fourfold.torch_private import without_torch_function
from fourfold.wire import Axis, Work


@dataclass(frozen=True)
class Owner:
    """A place in the model where a parameter hangs; tied weights have several."""

    module: nn.Module
    attribute: str


@dataclass(eq=False)
class Unit:
    """The weights of one block (or of what lies before or after the blocks).

    Attributes:
        index: place in execution order.
        name: of the block, for messages.
        arena: its storage.
        axis: the z axis.
        owners: for every slot, where its parameter hangs.
        hold: gradients stay whole on every rank until the last micro-batch (level optimizer), so that accumulation
            costs no traffic.
        codec: the form in which gradients cross; None: as the message's type.
        outer: it lies before or after the blocks, which bring their own weights in.
        stages: the pipeline stages that read its weights.
        hidden: the full weights are not here, or not up to date, and the parameters know it (`freed.Freed`).
    """

    index: int
    name: str
    arena: Arena
    axis: Axis
    owners: dict[str, tuple[Owner, ...]]
    hold: bool
    codec: Codec | None = None
    outer: bool = False
    stages: frozenset[int] = frozenset({0})
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    pins: int = 0
    hidden: bool = False
    _gather: tuple[Work, Tensor] | None = None
    _scatter: tuple[Work, Tensor] | None = None
    _summed: bool = False
    _held: Tensor | None = None
    _taken: set[int] = field(default_factory=set)

    # ---- the model's side

    def install(self) -> None:
        """Let the model's parameters view the full arena; a freed one keeps its shape and type.

        They stay the same objects, with their hooks and attributes, whoever else holds them. Those on the meta device
        cannot: others take their places in the modules.
        """
        self.arena.allocate()
        for slot, view in zip(self.arena.layout.slots, self.arena.views().values(), strict=True):
            first, *_ = self.owners[slot.name]
            parameter: nn.Parameter = getattr(first.module, first.attribute)
            if parameter.device.type == view.device.type:
                parameter.grad, parameter.data = None, view
            else:
                parameter = nn.Parameter(view, requires_grad=slot.group != FROZEN)
                for owner in self.owners[slot.name]:
                    setattr(owner.module, owner.attribute, parameter)
            self.parameters[slot.name] = parameter
        self.free()

    def watch(self, fired: Callable[[Unit, int], None]) -> None:
        """Call `fired(unit, number of the weight)` whenever one of the unit's gradients has been accumulated.

        Where nothing is cut, the gradient goes to its place at once, while it is in the cache.
        """
        places = self.arena.places() if self.arena.layout.parts == 1 else None
        for number, slot in enumerate(self.arena.layout.trained_slots):
            hook = self._taking(places[number], number, fired) if places else self._telling(number, fired)
            self.parameters[slot.name].register_post_accumulate_grad_hook(hook)

    def _telling(self, number: int, fired: Callable[[Unit, int], None]) -> Callable[[Tensor], None]:
        return lambda parameter: fired(self, number)

    def _taking(self, place: Tensor, number: int, fired: Callable[[Unit, int], None]) -> Callable[[Tensor], None]:
        taken = self._taken

        def hook(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:  # it is deferred (`pipe.deferred`)
                return
            if self._summed or number in taken:
                place.add_(gradient)
            else:
                place.copy_(gradient)
            taken.add(number)
            parameter.grad = None
            fired(self, number)

        return hook

    # ---- weights

    @property
    def live(self) -> bool:
        """The weights can be computed with."""
        return self.arena.live and self._gather is None

    @property
    def resident(self) -> bool:
        """Full weights rest on this rank; otherwise they are gathered for every use."""
        return self.arena.rest is not None

    def start(self) -> None:
        """Begin to bring the full weights in; does nothing when they are here or on their way."""
        if self.resident or self._gather is not None or self.arena.live:
            return
        # The full arena gets its storage when the weights are here: what reads too early fails, it never reads rubbish.
        self._gather = self._send(self.arena.layout.size)

    def ready(self) -> None:
        """The full weights are here when this returns."""
        if self.resident:
            self.settle_refresh()
            if self.arena.transient and not self.arena.live:
                self.arena.allocate()
                self.arena.expand()
            self._show()
            return
        self.start()
        if self._gather is not None:
            work, staged = self._gather
            work.wait()
            self.arena.allocate()
            self.arena.unpack(staged)
            self._gather = None
            self._show()

    def free(self) -> None:
        """The full weights are not needed until the next `ready` (unless somebody holds a pin)."""
        if self.pins:
            return
        if self._gather is not None and not self.resident:
            self.ready()
        self.arena.free()
        if self.arena.transient:
            self._hide()

    def make_room(self) -> None:
        """Storage for the full weights, of undefined contents until `free`: for somebody who writes what he must."""
        if not self.resident and not self.arena.live:
            self.arena.allocate()
            self._show()

    def _hide(self) -> None:
        if not self.hidden:
            hide(self.parameters, self.ready if self.resident else None)
            self.hidden = True

    def _show(self) -> None:
        if self.hidden:
            show(self.parameters.values())
            self.hidden = False

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """The full weights are here, and stay, for the length of the context. All ranks enter it together."""
        self.pins += 1
        try:
            self.ready()
            yield
        finally:
            self.pins -= 1
            self.free()

    def refresh(self, *, whole: bool = False) -> None:
        """The shard has changed: bring the resting weights up to date (begun here, finished at the next use).

        Args:
            whole: frozen weights have changed too (a checkpoint was loaded).
        """
        arena = self.arena
        if self.resident:
            self.settle_refresh()
        changed = arena.layout.size if whole else arena.layout.trained
        if arena.rest is None or arena.rest is arena.shard or changed == 0:
            return
        if arena.layout.parts == 1:
            arena.rest.data[:changed].copy_(arena.shard[:changed])
            return
        self._gather = self._send(changed)
        self._hide()

    def settle_refresh(self) -> None:
        """The gather begun by `refresh`, if there is one, is complete when this returns."""
        if self._gather is not None:
            work, staged = self._gather
            work.wait()
            self.arena.unpack(staged, into_rest=True)
            self._gather = None

    def _send(self, size: int) -> tuple[Work, Tensor]:
        staged = self.arena.staging(size)
        return self.axis.all_gather(staged.view(-1), self.arena.message()[:size], "weight"), staged

    # ---- gradients

    def begin(self) -> None:
        """A new step: the summed gradient is empty.

        Raises:
            PlacementError: the model's weights lie somewhere else.
        """
        self._summed, self._held = False, None
        if self.parameters and not self.arena.transient:
            name, parameter = next(iter(self.parameters.items()))
            if parameter.untyped_storage().data_ptr() != self.arena.full.untyped_storage().data_ptr():
                raise PlacementError(
                    f"{name}: was given other storage after the model was placed (model.to, model.float, "
                    "vector_to_parameters, an assignment to .data), which updates would not reach; set values by "
                    "load_state_dict, and element types by plan.placement.precision"
                )

    def abandon(self) -> None:
        """Forget the gradients of a backward that did not end."""
        if self._scatter is not None:
            self._scatter[0].wait()
        self._scatter, self._summed, self._held = None, False, None
        self._taken.clear()
        with without_torch_function():
            for parameter in self.parameters.values():
                parameter.grad = None

    def pack(self, *, last: bool) -> None:
        """Take the micro-batch's gradients off the parameters and begin to sum them over z.

        Args:
            last: this is the step's last micro-batch. Where gradients are held, only then is anything sent.
        """
        if self.arena.layout.parts == 1:
            self._complete()
            return
        slots = self.arena.layout.trained_slots
        gradients = [self.parameters[slot.name].grad for slot in slots]
        for slot in slots:
            self.parameters[slot.name].grad = None
        if self.hold:
            self._hold(gradients, last)
        else:
            self._reduce(self.arena.pack(gradients, self._crossing))

    def _complete(self) -> None:
        """One part: the gradients are in their places; those that did not come are zero."""
        if not self._summed and len(self._taken) < len(self.arena.layout.trained_slots):
            for number, place in enumerate(self.arena.places()):
                if number not in self._taken:
                    place.zero_()
        self._taken.clear()
        self._summed = True

    def stray(self) -> str | None:
        """A trained weight whose gradient came after the unit's had left, if there is one."""
        trained = (slot.name for slot in self.arena.layout.trained_slots)
        return next((name for name in trained if self.parameters[name].grad is not None), None)

    def _hold(self, gradients: list[Tensor | None], last: bool) -> None:
        alone = last and self._held is None
        packed = self.arena.pack(gradients, self._crossing if alone else self.arena.precision.master)
        if self._held is not None:
            packed = self._held.add_(packed)
        if last:
            self._held = None
            self._reduce(packed.to(self._crossing))
        else:
            self._held = packed

    def _reduce(self, message: Tensor) -> None:
        target = torch.empty_like(self.arena.gradient) if self._summed else self.arena.gradient
        self._scatter = (self.axis.reduce_scatter(target, message.view(-1), "gradient", codec=self.codec), target)

    def payload(self, count: int) -> int:
        """Bytes that so many elements of a gradient become on the wire."""
        itemsize = self._crossing.itemsize
        return count * itemsize if self.codec is None else self.codec.wire_bytes(count, itemsize)

    @property
    def _crossing(self) -> torch.dtype:
        """What a gradient message is packed in: a codec takes the master's type and makes its own form of it."""
        return self.arena.precision.message if self.codec is None else self.arena.precision.master

    def settle(self) -> None:
        """The scatter begun by `pack` is complete when this returns."""
        if self._scatter is None:
            return
        work, target = self._scatter
        work.wait()
        if target is not self.arena.gradient:
            self.arena.gradient.add_(target)
        self._scatter, self._summed = None, True
