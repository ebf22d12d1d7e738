"""Reads a transcript: which axis splits the features of every tensor, hence what every weight is on a tensor grid.

An embedding puts its columns over x (the residual stream lies over x). A linear sums over the axis of its input and
puts its output over the other one. Views, joins and reductions are followed dim by dim (`spread`), so it shows which
features a head keeps together and what is packed side by side. Nothing here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from fourfold.anatomy.roles import Dropout, Linear, Norm, Raw, Roles, Trouble, Whole
from fourfold.anatomy.spread import Segment, Spread, aligned, fresh
from fourfold.anatomy.transcript import Enter, Leave, Op, Ref, Transcript
from fourfold.anatomy.uses import Uses


class View(NamedTuple):
    """A parameter, or a view of one; `dims` says which of its dims each dim is (None: none, -1: several)."""

    name: str
    dims: tuple[int | None, ...]


class Subject(NamedTuple):
    """What is known of a model beside the transcript: its norms, its blocks, and the sizes of its weights."""

    transcript: Transcript
    norms: Collection[str]
    blocks: Collection[str]
    sizes: Mapping[str, tuple[int, ...]]


class Reading:
    """One reading; `run()` gives what it found.

    Attributes:
        found: so far.
        feeds: weight → weights that made what it reads.
    """

    def __init__(self, subject: Subject, whole: Mapping[str, str | None], handlers: Mapping[str, Callable]) -> None:
        """Nothing is read yet.

        Args:
            subject: the transcript and its model.
            whole: modules to take as whole → axis over which their output is cut.
            handlers: name of a function → what follows features through it; "" for all others.
        """
        self.subject, self.whole, self.handlers = subject, whole, handlers
        self.found = Roles()
        self.feeds: dict[str, set[str]] = {}
        self._spreads: dict[int, Spread] = {}
        self._views: dict[int, View] = {
            number: View(name, tuple(range(len(subject.sizes[name]))))
            for number, name in subject.transcript.parameters.items()
        }
        self._windows: dict[int, tuple[Ref, list[Any]]] = {}
        self._readers: dict[int, list[str]] = {}
        self._units: dict[str, int] = {}
        self._cuts: dict[str, set[int]] = {}
        self._uses = Uses()
        self._open = 0
        self._hidden: str | None = None
        self._norm: str | None = None

    def run(self) -> Roles:
        """Read it all."""
        for event in self.subject.transcript.events:
            if isinstance(event, Enter):
                self._open += 1
                self._enter(event)
            elif isinstance(event, Leave):
                self._open -= 1
                self._leave(event)
            else:
                self._read(event)
        return self._finished()

    def spread(self, ref: object) -> Spread | None:
        """Where the features of a tensor lie; None if nothing is known to split."""
        return self._spreads.get(ref.number) if isinstance(ref, Ref) else None

    def view(self, ref: object) -> View | None:
        """The parameter that a tensor is a view of."""
        return self._views.get(ref.number) if isinstance(ref, Ref) else None

    def put(self, ref: Ref, spread: Spread | None) -> None:
        """From here on this tensor's features lie so."""
        if spread is not None and spread.split is not None and ref.floating:
            self._spreads[ref.number] = spread
        else:
            self._spreads.pop(ref.number, None)

    def put_view(self, ref: Ref, view: View) -> None:
        """From here on this tensor is a view of a parameter."""
        self._views[ref.number] = view

    def put_window(self, ref: Ref, base: Ref, steps: list[Any]) -> None:
        """This tensor is what numbers and slices take of another: what is written to it is written there."""
        if all(isinstance(step, (int, slice)) for step in steps):
            self._windows[ref.number] = (base, steps)

    def window(self, ref: Ref) -> tuple[Ref, list[Any]] | None:
        """The tensor of which this is a part, and which part."""
        return self._windows.get(ref.number)

    def trouble(self, op: Op, line: str, spreads: Iterable[Spread | None] = ()) -> None:
        """Note what cannot be split."""
        suspects = frozenset().union(*(spread.makers for spread in spreads if spread))
        self.found.troubles.append(Trouble(op.where, f"{op.where or 'the model'}: {line}", suspects))

    def crossed(self, op: Op, spread: Spread) -> None:
        """It reduces across the features of a split tensor: a norm may."""
        if self._norm is not None:
            self.found.norms[self._norm] = Norm(spread.axis, True)
        elif spread.axis is not None:
            self.trouble(op, f"{op.name} across features that are split over {spread.axis}", [spread])

    def keep(self, spread: Spread, unit: int | None = None) -> None:
        """Something is done with these features: those of a unit must not be parted any more."""
        for source in spread.sources:
            self._units[source.weight] = max(self._units.get(source.weight, 1), unit or spread.apart)

    def packed(self, spread: Spread) -> None:
        """A part of what lies side by side was taken."""
        for source in spread.sources:
            self._cuts.setdefault(source.weight, set()).update((source.start, source.stop))

    def joins(self, view: View, spread: Spread, shape: tuple[int, ...]) -> None:
        """A parameter joins a tensor elementwise; `shape` is the view's own, aligned with the tensor on the right."""
        if view.name in self.found.linears or view.name in self.found.embeddings or spread.dim is None:
            return
        at = spread.dim - (len(spread.dims) - len(shape))
        spans = spread.axis is not None and at >= 0 and shape[at] > 1
        self.found.raw.setdefault(view.name, Raw(spread.axis, spans))

    def linear(self, op: Op, x: Ref, linear: Linear, name: str) -> None:
        """Note a linear that reads `x`; a weight that is used again must be used alike."""
        before = self.found.linears.setdefault(name, linear)
        if before.contract != linear.contract:
            line = f"contracted over {before.contract} by {before.module}, over {linear.contract} by {linear.module}"
            self.found.troubles.append(Trouble(op.where, f"{name}: {line}", self._made(x)))
        elif before.unit_in < linear.unit_in:
            self.found.linears[name] = before._replace(unit_in=linear.unit_in)
        if name in self.found.embeddings and linear.contract != "x":
            line = f"a table whose columns lie over x, contracted over {linear.contract} by {linear.module}"
            self.found.troubles.append(Trouble(op.where, f"{name}: {line}", self._made(x)))
        self._readers.setdefault(x.number, []).append(name)
        self.feeds.setdefault(name, set()).update(self._made(x))
        self._in_full(op.where, self.spread(x))

    def _in_full(self, where: str, spread: Spread | None) -> None:
        """All ranks use these features alike, or sum the gradients of what they make of them."""
        if spread is not None and spread.axis is None:
            self._uses.note(where, spread, None)

    def in_part(self, op: Op, spread: Spread, axis: str | None) -> None:
        """Every rank of an axis uses these features for split features of its own."""
        if spread.axis is None and axis is not None:
            self._uses.note(op.where, spread, axis)

    def inside_block(self, path: str) -> bool:
        """The module is a block or in one."""
        return any(path == block or path.startswith(f"{block}.") for block in self.subject.blocks)

    def _made(self, ref: Ref) -> frozenset[str]:
        spread = self.spread(ref)
        return spread.makers if spread else frozenset()

    def _enter(self, event: Enter) -> None:
        if self._hidden is not None:
            return
        spreads = [spread for spread in map(self.spread, event.inputs) if spread is not None]
        if event.path in self.whole:
            for spread in spreads:
                self._in_full(event.path, spread)
            axes = [spread.axis for spread in spreads if spread.axis] or [None]
            self._hidden = event.path
            whole = self.found.whole.setdefault(event.path, Whole(axes[0], self.whole[event.path]))
            misplaced = any(spread.axis and spread.dim != len(spread.dims) - 1 for spread in spreads)
            if misplaced:
                line = f"{event.path}: would be gathered, but its features do not lie in the last dim"
                self.found.troubles.append(Trouble(event.path, line, frozenset()))
            if any(axis != whole.inputs for axis in axes):
                line = f"{event.path}: reads features that lie over {whole.inputs}, and others over {axes[-1]}"
                self.found.troubles.append(Trouble(event.path, line, frozenset()))
        elif event.path in self.subject.norms and spreads:
            self._norm = event.path
            self.found.norms.setdefault(event.path, Norm(spreads[0].axis, False))

    def _leave(self, event: Leave) -> None:
        if event.path == self._hidden:
            self._hidden = None
            axis = self.whole[event.path]
            for place, ref in enumerate(event.outputs):
                made = segment(f"{event.path}:{place}", ref.shape[-1]) if ref.shape and axis is None else frozenset()
                self.put(ref, fresh(axis, ref.shape, -1, made) if ref.shape else None)
        if event.path == self._norm:
            self._norm = None
        if event.path == "":
            spreads = list(map(self.spread, event.outputs))
            for spread in spreads:
                self._in_full("", spread)
            self.found.outputs = tuple(spread.axis if spread else None for spread in spreads)
        elif not self._open:
            self._give_to_loss(event)

    def _give_to_loss(self, event: Leave) -> None:
        """A loss called this module itself."""
        spreads = list(map(self.spread, event.outputs))
        for spread in spreads:
            self._in_full(event.path, spread)
        last = [spread if spread and spread.dim == len(spread.dims) - 1 else None for spread in spreads]
        self.found.exits[event.path] = tuple(spread.axis if spread else None for spread in last)

    def _read(self, op: Op) -> None:
        for _ in range(op.draws):
            spread = self.spread(op.operands[0]) if self._hidden is None else None
            kind = "attention" if op.name == "scaled_dot_product_attention" else "dropout"
            self.found.dropouts.append(Dropout(op.where, spread.axis if spread else None, kind))
        if self._hidden is None:
            try:
                self.handlers.get(op.name, self.handlers[""])(self, op)
            except Exception as error:  # any function may be called in a way that nobody thought of
                self.trouble(op, f"cannot follow features through {op.name}: {type(error).__name__}: {error}")

    def _finished(self) -> Roles:
        found = self.found
        for name, linear in found.linears.items():
            parts = _sizes(self._cuts.get(name, set()))
            found.linears[name] = linear._replace(unit_out=self._units.get(name, 1), parts=parts)
        groups = (tuple(dict.fromkeys(names)) for names in self._readers.values())
        found.siblings = tuple(group for group in groups if len(group) > 1)
        for name, raw in list(found.raw.items()):
            norm = found.norms.get(name.rpartition(".")[0])
            if name in found.linears or name in found.embeddings or (norm is not None and norm == tuple(raw)):
                del found.raw[name]  # what the norm says holds for its weight
        self._uses.settle(found)
        return found


def _sizes(cuts: set[int]) -> tuple[int, ...]:
    ordered = sorted(cuts)
    return tuple(high - low for low, high in zip(ordered, ordered[1:], strict=False)) if len(ordered) > 2 else ()


def segment(name: str, size: int) -> frozenset[Segment]:
    """The whole output of a linear."""
    return frozenset([Segment(name, 0, size)])


def flow(reading: Reading, op: Op) -> None:
    """What is not known by name keeps the place of its operands' features: everything elementwise does."""
    results = op.results
    spreads = [spread for spread in map(reading.spread, op.operands) if spread is not None]
    if not spreads:
        _flow_of_parameter(reading, op)
        return
    for result in results:
        reading.put(result, joined(reading, op, result.shape))


def _flow_of_parameter(reading: Reading, op: Op) -> None:
    """An expanded, cast or shifted parameter is still that parameter."""
    views = [(ref, view) for ref in op.operands if (view := reading.view(ref)) is not None]
    if len({view.name for _, view in views}) != 1:
        return
    ref, view = views[0]
    for result in op.results:
        reading.put_view(result, View(view.name, matched(view.dims, ref.shape, result.shape)))


def matched(dims: tuple[int | None, ...], before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int | None, ...]:
    """Which dims of a parameter the dims of a view's view are: by their sizes from the right, else in order."""
    shift = len(after) - len(before)
    if shift >= 0 and all(size in (1, after[at + shift]) for at, size in enumerate(before)):
        return (*(None,) * shift, *(dim if size > 1 else None for dim, size in zip(dims, before, strict=True)))
    real = [(size, dim) for size, dim in zip(before, dims, strict=True) if size > 1]
    if [size for size, _ in real] == [size for size in after if size > 1]:
        left = iter(dim for _, dim in real)
        return tuple(next(left) if size > 1 else None for size in after)
    return tuple(-1 if size > 1 else None for size in after)


def joined(reading: Reading, op: Op, shape: tuple[int, ...]) -> Spread | None:
    """Where the features of the result lie, if all operands are joined elementwise; notes what that says of them."""
    placed = [(ref, aligned(spread, shape)) for ref in op.operands if (spread := reading.spread(ref)) is not None]
    spreads = [spread for _, spread in placed if spread is not None]
    if len(spreads) < len(placed):
        given = [reading.spread(ref) for ref, _ in placed]
        axis = next((spread.axis for spread in given if spread and spread.axis), None)
        if axis is not None:
            reading.trouble(op, f"cannot follow features over {axis} through {op.name}", given)
        return None
    if len({spread.axis for spread in spreads if spread.axis}) > 1:
        reading.trouble(op, f"{op.name} joins features over x with features over y", spreads)
    lead = max(spreads, key=lambda spread: (spread.axis is not None, spread.together))
    for other in spreads:
        _agree(reading, op, lead, other)
    for ref in op.operands:
        view = reading.view(ref)
        if view is not None:
            reading.joins(view, lead, ref.shape)
    return lead._replace(
        sources=frozenset().union(*(s.sources for s in spreads if s.axis == lead.axis)),
        before=frozenset().union(*(s.before for s in spreads), acting(reading, op, lead)),
    )


def acting(reading: Reading, op: Op, spread: Spread) -> frozenset[Segment]:
    """The parameters that join whole features here: their gradients are as whole, or as partial, as these features'."""
    views = [view.name for ref in op.operands if (view := reading.view(ref)) is not None]
    return frozenset(Segment(name, 0, 1) for name in views) if spread.axis is None else frozenset()


def _agree(reading: Reading, op: Op, lead: Spread, other: Spread) -> None:
    """Of two tensors that are joined, both are split at the same places."""
    reading.in_part(op, other, lead.axis)
    if other.axis is None and lead.axis is not None:
        if other.dim == lead.dim and not other.shared:
            reading.trouble(op, f"{op.name} joins whole features with features over {lead.axis}", [lead, other])
    elif other.dim != lead.dim and other.axis == lead.axis:
        reading.trouble(op, f"{op.name} joins features over {lead.axis} that lie in different dims", [lead, other])
    else:
        reading.keep(other, lead.together * other.apart // other.together)
