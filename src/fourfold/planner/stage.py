"""One stage of a pipeline and one micro-batch: seconds and bytes of its passes, read off the trace of the whole model.

A traced step tells what every layer's operators allocate and release, forward and backward. A stage's passes are those
of its layers; what its forward leaves behind for backward is its *stash*. Backward in two halves leaves the products
that make weights' gradients, and what these read, for later (`placement.pipe.deferred`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from fourfold.planner.line import Line
from fourfold.planner.recorder import AFTER, BEFORE, FORWARD
from fourfold.planner.tape import Event, Key, Segment, Tape
from fourfold.wire import formulas

Form = tuple[tuple[int, ...], int]
"""Of a tensor: its shape, and bytes of an element."""


class Rise(NamedTuple):
    """By how much a pass exceeds, at its highest moment, what lay there when it began; bytes by category."""

    activations: int = 0
    gradients: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.gradients + self.workspace


@dataclass
class Stage:
    """What a stage costs a micro-batch.

    Attributes:
        forward, backward, weight: seconds; of a whole backward, and of the products that may be left for later.
        stash, deferred: bytes that a forward, and a backward without these products, leave behind.
        given: bytes of what the stage before gives.
        back: bytes of the gradients that go back to it.
        sent: bytes on the wire of what goes to the next stage, and `returned` to the one before.
        rises: of a forward, a backward, a backward of the input and one of the weight.
        flops: of a forward and a backward.
        messages: numbers of the tape's, of a forward, and of a backward.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    stash: int = 0
    deferred: int = 0
    given: int = 0
    back: int = 0
    sent: int = 0
    returned: int = 0
    rises: tuple[Rise, Rise, Rise, Rise] = (Rise(), Rise(), Rise(), Rise())
    flops: int = 0
    messages: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def stages(
    tape: Tape, line: Line, bounds: Sequence[int], costs: Sequence[float], workspace: Sequence[int], kept: bool = False
) -> list[Stage]:
    """The stages between these bounds.

    Args:
        tape: a trace that tells the line's layers apart.
        costs: seconds of the tape's operators.
        workspace: bytes that they hold inside.
        kept: gradients stay beside the flat gradient until a stage's backward is done (weights that are cut).
    """
    found = []
    last = len(bounds) - 2
    given = [_crossing(tape, line, bound) for bound in bounds]
    for number, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        inside = set(range(first, end))
        inside |= {BEFORE} if number == 0 else set()
        inside |= {AFTER} if number == last else set()
        stage = _Player(tape, line, costs, workspace, kept).play([one for one in tape.segments if one.place in inside])
        taken, made = given[number], given[number + 1]
        if number:
            stage.given = sum(prod(shape) * size for (shape, size), _ in taken)
            stage.back = sum(prod(shape) * size for (shape, size), grad in taken if grad)
            stage.returned = formulas.message([form if grad else None for form, grad in taken])
        if number < last:
            stage.sent = formulas.message([((_words(tape, end),), 8), *(form for form, _ in made)])
        found.append(stage)
    return found


def _crossing(tape: Tape, line: Line, bound: int) -> list[tuple[Form, bool]]:
    """The values that cross there, and whether gradients come back for them."""
    if not 0 < bound < len(line.layers):
        return []
    looks = [tape.looks[value.layer][value.leaf] for value in line.layers.crossing(bound)]
    return [((shape, size), grad) for shape, size, grad in looks]


def _words(tape: Tape, bound: int) -> int:
    """Numbers that describe what crosses (`placement.pipe.bundle.Bundle.words`)."""
    return 2 + tape.extents + sum(1 + sum(3 + len(shape) for shape, _, _ in looks) for looks in tape.looks[:bound])


@dataclass
class _Level:
    """What a pass holds above what lay there when it began, and its highest moment."""

    activations: int = 0
    gradients: int = 0
    highest: Rise = field(default_factory=Rise)

    def look(self, fresh: int = 0, workspace: int = 0) -> None:
        """Is this the highest moment?"""
        now = Rise(self.activations, self.gradients + fresh, workspace)
        if now.total > self.highest.total:
            self.highest = now


class _Product(NamedTuple):
    """An operator of backward that makes a weight's gradient, and may do so later.

    Attributes:
        operator: its number.
        reads: storages.
        share: of its time that goes to the weight.
        nbytes: of the gradient.
    """

    operator: int
    reads: frozenset[Key]
    share: float
    nbytes: int


class _Player:
    """Plays the segments of one stage."""

    def __init__(
        self, tape: Tape, line: Line, costs: Sequence[float], workspace: Sequence[int], kept: bool = False
    ) -> None:
        self.tape, self.costs, self.workspace, self.kept = tape, costs, workspace, kept
        calls = line.layers.calls
        tied = {name for layer in calls for name in layer.reads if sum(name in one.reads for one in calls) > 1}
        self._tied = {prod(line.weights[name].shape) for name in tied}

    def play(self, segments: Sequence[Segment]) -> Stage:
        """A stage that has these."""
        forwards = [event for one in segments if one.phase == FORWARD for event in one.events]
        backwards = [event for one in segments if one.phase != FORWARD for event in one.events]
        alive: set[Key] = set()
        forward = self._pass(forwards, alive, frozenset())
        products = self._products(backwards)
        later = frozenset(key for product in products for key in product.reads)
        whole = self._pass(backwards, set(alive), frozenset())
        by_input = self._pass(backwards, set(alive), later)
        return Stage(
            forward=self._seconds(forwards),
            backward=self._seconds(backwards),
            weight=sum(self.costs[one.operator] * one.share for one in products),
            stash=self._bytes(alive),
            deferred=self._bytes(later),
            rises=(forward, whole, by_input, Rise(gradients=max((one.nbytes for one in products), default=0))),
            flops=sum(self.tape.operators[one.number]["flops"] for one in (*forwards, *backwards) if one.kind == "op"),
            messages=(_sent(forwards), _sent(backwards)),
        )

    def _seconds(self, events: Sequence[Event]) -> float:
        return sum(self.costs[event.number] for event in events if event.kind == "op")

    def _bytes(self, keys: Iterable[Key]) -> int:
        return sum(self.tape.storages[key].nbytes for key in keys)

    def _products(self, events: Sequence[Event]) -> list[_Product]:
        """Products of two tensors neither of which is a weight, whose result is a weight's gradient."""
        found: list[_Product] = []
        born: list[Key] = []
        reads: list[Key] = []
        for event in events:
            if event.kind == "+" and event.key is not None:
                born.append(event.key)
            elif event.kind == "use" and event.key is not None:
                reads.append(event.key)
            elif event.kind == "op":
                product = self._product(event.number, born, reads)
                found += [] if product is None else [product]
                born, reads = [], []
        return found

    def _product(self, number: int, born: Sequence[Key], reads: Sequence[Key]) -> _Product | None:
        operator, sizes = self.tape.operators[number], [self.tape.storages[key].nbytes for key in born]
        own = [key for key in born if self.tape.storages[key].gradient_of is not None]
        if not operator["flops"] or not born:
            return None
        if not own and not (len(reads) == 2 and operator["name"].startswith("aten.mm") and self._is_tied(sizes)):
            return None
        share = 0.5 if own and len(own) < len(born) and "convolution" in operator["name"] else 1.0
        return _Product(number, frozenset(reads), share, self._bytes(own or born))

    def _is_tied(self, sizes: Sequence[int]) -> bool:
        """Of a weight that several layers read the trace has one gradient a layer; only their sum is the weight's."""
        return any(nbytes % numel == 0 and nbytes // numel in (2, 4, 8) for nbytes in sizes for numel in self._tied)

    def _pass(self, events: Sequence[Event], alive: set[Key], later: frozenset[Key]) -> Rise:
        """Let storages come and go.

        Args:
            alive: those of this stage that are there; changed.
            later: storages that stay for products that are left for later, and what these make does not come.
        """
        level, storages, fresh = _Level(), self.tape.storages, 0
        for event in events:
            key = event.key
            if event.kind == "+" and key is not None:
                one = storages[key]
                if one.gradient_of is None:
                    alive.add(key)
                    level.activations += one.nbytes
                elif self.kept:
                    level.gradients += one.nbytes
                elif not later:
                    fresh = one.nbytes
                level.look(fresh)
            elif event.kind == "-" and key in alive and key not in later:
                alive.discard(key)
                level.activations -= storages[key].nbytes
            elif event.kind == "op":
                level.look(fresh, self.workspace[event.number])
                fresh = 0
        return level.highest


def _sent(events: Iterable[Event]) -> tuple[int, ...]:
    return tuple(event.number for event in events if event.kind == "send")
