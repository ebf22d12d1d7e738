"""Reads a transcript: which axis splits the features of every tensor, hence what every weight is on a tensor grid.

An embedding puts its columns over x (the residual stream lies over x). A linear sums over the axis of its input and
puts its output over the other one. Views, joins and reductions are followed dim by dim (`spread`), so it shows which
features a head keeps together and what is packed side by side. Nothing here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fourfold.anatomy.bystanders import Bystanders, View
from fourfold.anatomy.roles import Beside, Dropout, Linear, Norm, Raw, Roles, Trouble, Whole
from fourfold.anatomy.spread import Segment, Spread, fresh
from fourfold.anatomy.transcript import Enter, Leave, Op, Ref, Transcript
from fourfold.anatomy.uses import Uses


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
        self._bystanders = Bystanders(subject.transcript, subject.sizes)
        self._windows: dict[int, tuple[Ref, list[Any]]] = {}
        self._readers: dict[int, list[str]] = {}
        self._units: dict[str, int] = {}
        self._cuts: dict[str, set[int]] = {}
        self._uses = Uses()
        self._linear: Op | None = None
        self._read_whole: dict[str, str] = {}
        self._entered: dict[str, str | None] = {}
        self._turned: list[Trouble] = []
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
        """Of which parameter, buffer or given tensor without features a tensor is a view."""
        return self._bystanders.view(ref) if isinstance(ref, Ref) else None

    def weight(self, ref: object) -> View | None:
        """The parameter that a tensor is a view of."""
        view = self.view(ref)
        return None if view is None or view.fixed else view

    def put(self, ref: Ref, spread: Spread | None) -> None:
        """From here on this tensor's features lie so."""
        if spread is not None and spread.split is not None and ref.floating:
            self._spreads[ref.number] = spread
        else:
            self._spreads.pop(ref.number, None)

    def put_view(self, ref: Ref, view: View) -> None:
        """From here on this tensor is a view of something without features."""
        self._bystanders.put(ref, view)

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

    def joins(self, op: Op, view: View, spread: Spread, shape: tuple[int, ...]) -> None:
        """A tensor without features joins one with; `shape` is the view's own, aligned with the other on the right."""
        if spread.dim is not None:
            at = spread.dim - (len(spread.dims) - len(shape))
            self.lies(op, view, spread, at if at >= 0 and shape[at] > 1 else None)

    def lies(self, op: Op, view: View, spread: Spread, at: int | None) -> None:
        """Dim `at` of a view runs over the features that a tensor has in its split dim; None: all of it joins each."""
        if view.name in self.found.linears or view.name in self.found.embeddings:
            return
        dim = view.dims[at] if at is not None and spread.axis is not None else None
        spans = dim is not None
        if view.fixed:
            if dim is not None and dim >= 0:
                self._lies_beside(op, view, spread, dim - view.rank)
            return
        # Views whose dims nobody can tell are taken for turned ones of vectors; the rehearsal compares their shapes.
        last = dim - view.rank if dim is not None and dim >= 0 else -1
        mine = Raw(spread.axis, spans, last, spans and spread.apart > spread.together)
        raw = self.found.raw.setdefault(view.name, mine)
        if spread.axis is not None and not spans:
            self._uses.note(op.where, segment(view.name, 1), spread.axis)
        if raw != mine and (raw.spans or spans):
            line = f"{view.name} joins features over {mine.axis} here, and features over {raw.axis} elsewhere"
            self.trouble(op, line if mine.axis != raw.axis else f"{view.name} joins features in two ways", [spread])

    def _lies_beside(self, op: Op, view: View, spread: Spread, dim: int) -> None:
        module, name = (op.where, view.name) if view.place is None else (view.name, view.place)
        size = spread.dims[spread.split[0]][spread.split[1]].size * spread.together if spread.split else 1
        mine = Beside(spread.axis or "", dim, size, spread.apart > spread.together, module, name)
        if module == op.where and self.found.beside.setdefault(f"{module}:{name}", mine) != mine:
            self.trouble(op, f"{mine.what} joins split features in two ways", [spread])

    def linear(self, op: Op, x: Ref, linear: Linear, name: str) -> None:
        """Note a linear that reads `x`; a weight that is used again must be used alike."""
        before = self.found.linears.setdefault(name, linear)
        if before.contract != linear.contract:
            line = f"contracted over {before.contract} by {before.module}, over {linear.contract} by {linear.module}"
            self.found.troubles.append(Trouble(op.where, f"{name}: {line}", self._makers(x)))
        elif before.unit_in < linear.unit_in:
            self.found.linears[name] = before._replace(unit_in=linear.unit_in)
        if name in self.found.embeddings and linear.contract != "x":
            line = f"a table whose columns lie over x, contracted over {linear.contract} by {linear.module}"
            self.found.troubles.append(Trouble(op.where, f"{name}: {line}", self._makers(x)))
        self._readers.setdefault(x.number, []).append(name)
        self.feeds.setdefault(name, set()).update(self._makers(x))
        self._uses.note(op.where, self.made(x), None)
        self._linear = op

    def made(self, ref: Ref) -> frozenset[Segment]:
        """The whole features that are in a tensor; none in one that is split."""
        spread = self.spread(ref)
        if spread is None:
            return self._uses.within(ref.number)
        return self._uses.within(ref.number) | spread.made_of if spread.axis is None else frozenset()

    def _follow(self, op: Op, given: Sequence[tuple[Ref, Spread | None, frozenset[Segment]]]) -> None:
        """What a function does with whole features: beside split ones every rank uses them for its own."""
        made = frozenset().union(*(made for _, _, made in given))
        axes = {spread.axis for _, spread, _ in given if spread is not None and spread.axis}
        for axis in axes:
            self._uses.note(op.where, made, axis)
        if axes or op is self._linear:
            return
        lost = frozenset().union(*(made for _, spread, made in given if spread is None))
        if all(spread is None for _, spread, _ in given):
            names = {view.name for ref, _, _ in given if (view := self.weight(ref)) is not None}
            lost = made = made | {Segment(name, 0, 1) for name in names}
        for result in self._written(op):
            spread, view = self.spread(result), self.weight(result)
            if spread is None:  # what a parameter joins is said of itself
                self._uses.put(result.number, made - segment(view.name, 1) if view else made)
            elif spread.axis is None:
                self._uses.put(result.number, lost if spread.made_of else made)

    def _written(self, op: Op) -> Iterator[Ref]:
        """What a function gives, and what it writes to."""
        for ref in (*op.results, *(op.operands[:1] if op.name == "__setitem__" else ())):
            yield ref
            while (window := self.window(ref)) is not None and window[0].number < ref.number:
                ref = window[0]
                yield ref

    def inside_block(self, path: str) -> bool:
        """The module is a block or in one."""
        return any(path == block or path.startswith(f"{block}.") for block in self.subject.blocks)

    def _makers(self, ref: Ref) -> frozenset[str]:
        spread = self.spread(ref)
        return spread.makers if spread else frozenset()

    def _enter(self, event: Enter) -> None:
        featureless = [(place, ref) for place, ref in enumerate(event.inputs) if self.spread(ref) is None]
        self._bystanders.enter(event.path, featureless)
        if self._hidden is not None:
            return
        spreads = [spread for spread in map(self.spread, event.inputs) if spread is not None]
        if event.path in self.subject.blocks and spreads:
            self._entered[event.path] = spreads[0].axis
        if event.path in self.whole:
            for ref in event.inputs:
                self._uses.note(event.path, self.made(ref), None)
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
        self._bystanders.leave()
        if event.path == self._hidden:
            self._hidden = None
            axis = self.whole[event.path]
            if axis and any(ref.shape[-1:] == (1,) for ref in event.outputs):
                line = f"{event.path}: gives a single feature, which is not to be cut"
                self.found.troubles.append(Trouble(event.path, line, frozenset()))
            for place, ref in enumerate(event.outputs):
                made = frozenset() if axis else segment(f"{event.path}:{place}", ref.shape[-1] if ref.shape else 1)
                self.put(ref, fresh(axis, ref.shape, -1, made) if ref.shape else None)
                self._uses.put(ref.number, frozenset() if ref.shape else made)
        if event.path == self._norm:
            self._norm = None
        if event.path in self._entered and event.outputs and (given := self.spread(event.outputs[0])) is not None:
            before = self._entered.pop(event.path)
            if before != given.axis and any(path.startswith(f"{event.path}.") for path in self.found.whole):
                line = f"takes features over {before}, and gives them over {given.axis} by what runs whole in it"
                self._turned.append(Trouble(event.path, f"{event.path}: {line}", frozenset()))
        if event.path == "":
            spreads = list(map(self.spread, event.outputs))
            for ref in event.outputs:
                self._uses.note("", self.made(ref), None)
            self.found.outputs = tuple(spread.axis if spread else None for spread in spreads)
        elif not self._open:
            self._give_to_loss(event)

    def _give_to_loss(self, event: Leave) -> None:
        """A loss called this module itself."""
        spreads = list(map(self.spread, event.outputs))
        for ref in event.outputs:
            self._uses.note(event.path, self.made(ref), None)
        last = [spread if spread and spread.dim == len(spread.dims) - 1 else None for spread in spreads]
        self.found.exits[event.path] = tuple(spread.axis if spread else None for spread in last)

    def _read(self, op: Op) -> None:
        for _ in range(op.draws):
            spread = self.spread(op.operands[0]) if self._hidden is None else None
            kind = "attention" if op.name == "scaled_dot_product_attention" else "dropout"
            self.found.dropouts.append(Dropout(op.where, spread.axis if spread else None, kind))
        if self._hidden is not None:
            views = [view for ref in op.operands if (view := self.weight(ref)) is not None]
            self._read_whole.update((view.name, self._hidden) for view in views)
        else:
            given = [(ref, self.spread(ref), self.made(ref)) for ref in op.operands]
            try:
                self.handlers.get(op.name, self.handlers[""])(self, op)
            except Exception as error:  # any function may be called in a way that nobody thought of
                self.trouble(op, f"cannot follow features through {op.name}: {type(error).__name__}: {error}")
            self._follow(op, given)

    def _finished(self) -> Roles:
        found = self.found
        for name, linear in found.linears.items():
            parts = _sizes(self._cuts.get(name, set()))
            found.linears[name] = linear._replace(unit_out=self._units.get(name, 1), parts=parts)
        groups = (group for names in self._readers.values() for group in self._in_blocks(dict.fromkeys(names)))
        found.siblings = tuple(group for group in groups if len(group) > 1)
        for name, path in self._read_whole.items():
            if name in found.linears or name in found.embeddings:
                line = f"{path}: runs whole, and reads {name}, which is split elsewhere"
                found.troubles.append(Trouble(path, line, frozenset([name])))
        self._uses.settle(found)
        found.troubles = found.troubles or self._turned  # all would be split, but the residual in other ways by turns
        for name, raw in list(found.raw.items()):
            norm = found.norms.get(name.rpartition(".")[0])
            if name in found.linears or name in found.embeddings or (norm is not None and norm == raw[:2]):
                del found.raw[name]  # what the norm says holds for its weight
        return found

    def _in_blocks(self, names: Iterable[str]) -> Iterable[tuple[str, ...]]:
        """Weights that are there at the same time: those of one block, or of none."""
        found: dict[str, list[str]] = {}
        for name in names:
            block = next((block for block in self.subject.blocks if name.startswith(f"{block}.")), "")
            found.setdefault(block, []).append(name)
        return map(tuple, found.values())


def _sizes(cuts: set[int]) -> tuple[int, ...]:
    ordered = sorted(cuts)
    return tuple(high - low for low, high in zip(ordered, ordered[1:], strict=False)) if len(ordered) > 2 else ()


def segment(name: str, size: int) -> frozenset[Segment]:
    """The whole output of a linear."""
    return frozenset([Segment(name, 0, size)])
