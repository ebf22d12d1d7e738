"""Gradients leave in one fixed order, whatever order autograd finishes them in.

Collectives must be issued alike on every rank. A unit therefore departs when it *and all units after it in execution
order* are complete; what autograd never finished (weights that this rank's batch did not touch) departs at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fourfold.placement.layout import FROZEN
from fourfold.placement.refusals import PlacementError
from fourfold.placement.unit import Unit
from fourfold.plan import Events, GradientReady
from fourfold.torch_private import without_torch_function


class StrayGradient(RuntimeError):
    """A gradient that would have been lost."""


class Departures:
    """Counts accumulated gradients, packs and scatters units in reverse execution order, announces finished ones."""

    def __init__(self, units: Sequence[Unit], events: Events, *, overlap: bool):
        """Watch the units' parameters. With `overlap` off every scatter is waited for at once."""
        self.order = tuple(reversed(units))
        self.events, self.overlap = events, overlap
        self.active = False
        self._frozen = {
            unit.index: [slot.name for slot in unit.arena.layout.slots if slot.group == FROZEN] for unit in units
        }
        self._over: set[int] = set()
        self._in_flight: Counter[int] = Counter()
        self._leaving: tuple[Unit, ...] = ()
        self._awaits_edge: set[int] = set()
        self._missing: dict[int, set[int]] = {}
        self._complete: set[int] = set()
        self._departed = 0
        self._last: set[int] = set()
        self._leaves = True
        self._pending: Unit | None = None
        for unit in units:
            unit.watch(self._fired)

    def expect_edge(self, unit: Unit) -> None:
        """The unit is complete only once backward has left it (its frozen weights may be needed until then).

        Said in every forward, and true of every later one: several micro-batches may be in flight.
        """
        self._awaits_edge.add(unit.index)

    def begin(self) -> None:
        """A new step: no stage's last backward has begun."""
        self._over.clear()
        self._in_flight.clear()

    def enter(self, stage: int, change: int) -> None:
        """A micro-batch's forward through a stage begins (1), or the backward for which weights are wanted (-1)."""
        self._in_flight[stage] += change

    def open(self, stage: int, *, last: bool, leaves: bool = True) -> None:
        """A backward of a stage begins. `last`: of that stage in the step.

        With `leaves` off it is the half by the input: gradients that come stay where they are, for those of the other
        half to join them. That one is opened when nothing is in flight of it any more.

        A weight that several stages of this rank read leaves for good with the last backward of the last of them.
        """
        if last:
            self._over.add(stage)
        self._leaving = tuple(unit for unit in self.order if stage in unit.stages)
        self._missing = {unit.index: set(range(len(unit.arena.layout.trained_slots))) for unit in self._leaving}
        self._complete = {index for index, missing in self._missing.items() if not missing}
        self._last = {unit.index for unit in self._leaving if unit.stages <= self._over}
        self._leaves = leaves
        self._departed, self.active = 0, True

    def abandon(self) -> None:
        """A backward did not end: its gradients are forgotten, and what is under way is waited for."""
        self._awaits_edge.clear()
        self._pending, self.active = None, False
        for unit in self.order:
            unit.abandon()
            unit.free()

    def left(self, unit: Unit) -> None:
        """Backward has left the unit: nothing will read its weights again in this micro-batch."""
        unit.free()
        self._finish(unit)

    def close(self) -> None:
        """The backward is over: everything departs, arrives, and is announced if the step is complete."""
        if self._leaves:
            self._depart(len(self._leaving))
            self._arrive(None)
        self.active = False
        for unit in self._leaving:
            if not (unit.outer and any(self._in_flight[stage] for stage in unit.stages)):
                unit.free()
            if not self._leaves:
                continue
            with without_torch_function():
                self._refuse_changed(unit)
                stray = unit.stray()
            if stray is not None:
                raise StrayGradient(
                    f"{stray}: a gradient came after the gradients of {unit.name} had left; expected one backward a "
                    "micro-batch. Does the model call backward inside itself (reentrant checkpointing)? Use "
                    "plan.placement.recompute instead"
                )

    def _refuse_changed(self, unit: Unit) -> None:
        """Who gets gradients was settled when the model was placed. Looks only where no gradient came."""
        trained = unit.arena.layout.trained_slots
        without = [trained[number].name for number in self._missing[unit.index]]
        changed = [name for name in without if not unit.parameters[name].requires_grad]
        changed += [name for name in self._frozen[unit.index] if unit.parameters[name].requires_grad]
        if changed:
            raise PlacementError(
                f"{changed[0]}: requires_grad has changed since the model was placed, when its place for gradients was "
                "settled; nothing was updated. Freeze and unfreeze before fourfold.parallelize: "
                "run.model.state_dict() carries the weights over to a new run"
            )

    def _fired(self, unit: Unit, number: int) -> None:
        if not self.active:
            unit.abandon()
            name = unit.arena.layout.trained_slots[number].name
            raise PlacementError(
                f"{name}: a backward outside of this run's steps reached it; expected run.step to call backward. "
                "Take such gradients by torch.autograd.grad, or freeze the weights (requires_grad_(False)) before the "
                "model is placed"
            )
        missing = self._missing[unit.index]
        missing.discard(number)
        if not missing and unit.index not in self._awaits_edge and unit.index not in self._complete:
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        if not self._leaves:
            return
        self._complete.add(unit.index)
        ready = self._departed
        while ready < len(self._leaving) and self._leaving[ready].index in self._complete:
            ready += 1
        self._depart(ready)

    def _depart(self, upto: int) -> None:
        while self._departed < upto:
            unit = self._leaving[self._departed]
            self._departed += 1
            if unit.arena.layout.trained == 0:
                continue
            unit.settle()
            self._arrive(unit)
            with without_torch_function():  # a freed parameter would be asked whether its `.grad` may be read
                unit.pack(last=unit.index in self._last)
            if not self.overlap:
                self._arrive(None)

    def _arrive(self, following: Unit | None) -> None:
        """The unit that departed before is summed over z; `following` takes its place."""
        arrived, self._pending = self._pending, following
        if arrived is None:
            return
        arrived.settle()
        if arrived.index in self._last:
            self.events.publish(GradientReady(arrived.index, arrived.arena.summed))
