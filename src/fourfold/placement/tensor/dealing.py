"""How every weight of a model is cut over x and y: from its anatomy, by arithmetic, before anything is allocated.

Features of the residual are dealt over x one by one, heads in whole heads, what is packed (q|k|v) part by part. Where
queries share key-value heads, all of them are dealt by the key-value heads; on more ranks than key-value heads,
neighbours hold copies of one, and the queries of that head are dealt among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from fourfold.anatomy import Anatomy, Linear, Raw
from fourfold.placement.cut import Cut, Share, deal
from fourfold.placement.refusals import NEAREST, PlacementError
from fourfold.plan.grid import Grid

SMALL_TABLE = 16
"""The rows of a table with this many times fewer rows than the largest one lie whole on every rank of y: positions and
token types. They cost little memory, and looking them up no message."""


@dataclass
class Dealing:
    """Cuts of weights as they are found, and what is to be done about what is not cut.

    Attributes:
        anatomy: of the model.
        sizes: of x and y.
        names: id of a parameter of the model → its logical name.
        cuts: of every weight.
        partial: weight → what its gradient must be summed over, since every rank uses it for features of its own: an
            axis, or the neighbours that hold copies of the same heads.
        known: by axis and whole size, how so many features (or heads) are dealt.
    """

    anatomy: Anatomy
    sizes: dict[str, int]
    names: dict[int, str]
    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: dict[str, Share | str] = field(default_factory=dict)
    known: dict[tuple[str, int], list[Share]] = field(default_factory=dict)
    _outputs: dict[tuple[str, int, str], Share] = field(default_factory=dict)
    _heads: dict[tuple[str, int, str], Share] = field(default_factory=dict)

    def share(self, linear: Linear, size: int, axis: str | None, unit: int) -> Share | None:
        """How the input features of a linear are dealt: as the outputs of a neighbour in its module are, if one is."""
        if axis is None or self.sizes[axis] == 1:
            return None
        # Where the residual lies over the same axis, only heads are sure to be those of a neighbour.
        known = self._outputs.get((_parent(linear.module), size, axis))
        known = known if unit > 1 or linear.contract != linear.output else None
        return known or self.evenly(size, axis, unit)

    def evenly(self, size: int, axis: str, unit: int = 1) -> Share:
        """Units one after the other."""
        ranks = self.sizes[axis]
        runs = (deal(size // unit, ranks, index) for index in range(ranks))
        return self.remember(Share(axis, tuple((range(run.start * unit, run.stop * unit),) for run in runs)), size)

    def note(self, linear: Linear, size: int, share: Share) -> None:
        """A linear's output features are dealt so."""
        self._outputs.setdefault((_parent(linear.module), size, share.axis), share)

    def beside(self, what: str, scope: str, axis: str, size: int, *, heads: bool) -> Share:
        """How a dim of `what` is dealt that runs over split features, or heads, in the module `scope`: as these are.

        Raises:
            PlacementError: so many heads are dealt in several ways.
        """
        made = (self._heads if heads else self._outputs).get((scope, size, axis))
        known = self.known.get((axis, size), [])
        if made is None and heads and len(known) > 1:
            raise PlacementError(
                f"{what}: has an entry for each of {size} heads over {axis}, and so many are dealt in {len(known)} "
                f"ways: expected heads of one attention, in its own module; leave out plan.placement.tensor.{axis}"
            )
        return made or (known[0] if len(known) == 1 else self.evenly(size, axis))

    def remember(self, share: Share, size: int) -> Share:
        """So many features, or heads, are dealt so."""
        known = self.known.setdefault((share.axis, size), [])
        if share not in known:
            known.append(share)
        return share

    def ways(self, coordinates: Mapping[str, int]) -> dict[tuple[int, int], list[list[int]]]:
        """(whole size, size here) of everything that is dealt → the ways in which so many indices are dealt to here."""
        found: dict[tuple[int, int], list[list[int]]] = {}
        for (axis, size), shares in self.known.items():
            for share in shares:
                here = [index for run in share.runs[coordinates[axis]] for index in run]
                ways = found.setdefault((size, len(here)), [])
                if here not in ways:
                    ways.append(here)
        return found

    def runs(self, axis: str, size: int, here: int, index: int) -> tuple[range, ...]:
        """The indices, of `size` over an axis, that the rank at `index` holds, given how many they are.

        Raises:
            PlacementError: nothing that is dealt has these sizes.
        """
        for share in self.known.get((axis, size), ()):
            if share.extent(index) == here:
                return share.runs[index]
        raise PlacementError(
            f"a dropout's tensor has {here} of {size} entries over {axis}: expected a number by which features or "
            "heads are dealt; leave out plan.placement.tensor, or set the dropout to 0"
        )


def deal_weights(model: nn.Module, anatomy: Anatomy, grid: Grid) -> Dealing:
    """Cut every weight of the model.

    Raises:
        PlacementError: something does not fit the grid; names the layer, the axis and the nearest sizes that fit.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    _refuse_vectors(anatomy)
    dealing = Dealing(anatomy, {"x": grid.x, "y": grid.y}, names)
    biases = {name: bias_of(model, linear, names) for name, linear in anatomy.linears.items()}
    for group in _groups(anatomy):
        _deal_group(dealing, group, shapes, biases)
    for name, axis in anatomy.embeddings.items():
        if name not in dealing.cuts:
            _deal_table(dealing, name, axis, shapes)
    for path, norm in anatomy.norms.items():
        for name in _own(model, path, names):
            if not norm.spans and name in anatomy.raw:  # a group norm's: one element a channel
                continue
            _deal_vector(dealing, name, shapes, Raw(norm.axis, norm.spans), _parent(path))
    for name, raw in anatomy.raw.items():
        if name not in dealing.cuts:
            holder = _parent(name)
            scope = _parent(holder) if holder in anatomy.norms else holder
            _deal_vector(dealing, name, shapes, raw, scope)
    for name, shape in shapes.items():
        dealing.cuts.setdefault(name, Cut(shape, (None,) * len(shape)))
    return dealing


def _refuse_vectors(anatomy: Anatomy) -> None:
    for name, linear in anatomy.linears.items():
        if "out" not in linear.layout.split(","):
            raise PlacementError(
                f"{name}: {linear.module or 'the model'} sums its products with features that lie over "
                f"{linear.contract}: expected a weight with a dim of output features, found a vector; make it an "
                "nn.Linear of one feature, or leave out plan.placement.tensor"
            )


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _own(model: nn.Module, path: str, names: Mapping[int, str]) -> list[str]:
    return [names[id(parameter)] for parameter in model.get_submodule(path).parameters(recurse=False)]


def _groups(anatomy: Anatomy) -> Iterator[list[str]]:
    """Linears whose outputs are dealt together: siblings of one attention, else each by itself; producers first."""
    seen: set[str] = set()
    for name in anatomy.linears:
        if name not in seen:
            group = next((list(names) for names in anatomy.siblings if name in names), [name])
            seen.update(group)
            yield [one for one in group if one in anatomy.linears]


def _dims(layout: str) -> tuple[int, int]:
    """(dim of the output features, dim of the input features)."""
    order = layout.split(",")
    return order.index("out"), order.index("in")


def _deal_group(
    dealing: Dealing,
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    biases: Mapping[str, str | None],
) -> None:
    linears = dealing.anatomy.linears
    sections = {name: _sections(linears[name], shapes[name]) for name in names}
    counts = [size // linears[name].unit_out for name in names for size in sections[name] if linears[name].unit_out > 1]
    axis = linears[names[0]].output
    if counts and axis is not None and dealing.sizes[axis] > max(counts) == min(counts):
        # Copies of a key-value head serve queries of their own; without more queries they would count twice.
        raise PlacementError(_too_few(names[0], axis, dealing.sizes[axis], counts[0], "heads"))
    for name in names:
        linear, shape = linears[name], shapes[name]
        out, into = _dims(linear.layout)
        shares: list[Share | None] = [None] * len(shape)
        axis = linear.output
        if axis is not None and dealing.sizes[axis] > 1:
            share = shares[out] = _outputs(dealing, name, axis, sections[name], counts)
            dealing.note(linear, shape[out], share)
            if share.copies > 1:
                dealing.partial[name] = share
        shares[into] = dealing.share(linear, shape[into], linear.contract, linear.unit_in)
        _refuse_empty(name, shares[into], shape[into], "input features")
        _settle(dealing, name, Cut(shape, tuple(shares)))
        bias = biases[name]
        if bias is not None:
            _settle(dealing, bias, Cut(shapes[bias], (shares[out],)))
            if name in dealing.partial:
                dealing.partial[bias] = dealing.partial[name]


def _sections(linear: Linear, shape: tuple[int, ...]) -> tuple[int, ...]:
    return linear.parts or (shape[_dims(linear.layout)[0]],)


def _outputs(dealing: Dealing, name: str, axis: str, sections: Sequence[int], counts: Sequence[int]) -> Share:
    """The output features of one linear, section by section."""
    linear, ranks = dealing.anatomy.linears[name], dealing.sizes[axis]
    unit = linear.unit_out
    runs: list[list[range]] = [[] for _ in range(ranks)]
    start = 0
    for size in sections:
        count = size // unit
        if unit > 1:
            dealt = [_heads(name, count, min(counts), axis, ranks, index) for index in range(ranks)]
        else:
            dealt = [deal(count, ranks, index) for index in range(ranks)]
        if not all(dealt):
            raise PlacementError(_too_few(name, axis, ranks, count, "heads" if unit > 1 else "features"))
        units = dealing.remember(Share(axis, tuple((units,) for units in dealt)), count)
        if unit > 1:
            dealing._heads.setdefault((_parent(linear.module), count, axis), units)
        each, copies = count // min(counts, default=count), ranks // min(counts, default=ranks)
        if each > 1 < copies:  # the queries of one key-value head, which code may count
            dealing.remember(Share(axis, tuple((deal(each, copies, at % copies),) for at in range(ranks))), each)
        for units, mine in zip(dealt, runs, strict=True):
            mine.append(range(start + units.start * unit, start + units.stop * unit))
        section = Share(axis, tuple((range(units.start * unit, units.stop * unit),) for units in dealt))
        dealing.note(linear, size, dealing.remember(section, size))
        start += size
    return dealing.remember(Share(axis, tuple(map(tuple, runs))), start)


def features_of(dealing: Dealing, name: str, index: int) -> Iterator[tuple[int, int]]:
    """(output features of the whole, those here) of every section of a linear's weight, and of all of them."""
    cut, linear = dealing.cuts[name], dealing.anatomy.linears[name]
    out, _ = _dims(linear.layout)
    share = cut.shares[out]
    assert share is not None
    yield from zip(_sections(linear, cut.shape), map(len, share.runs[index]), strict=True)


def _heads(name: str, heads: int, groups: int, axis: str, ranks: int, index: int) -> range:
    """Which of `heads` heads a rank gets, where every `groups`-th part of them belongs to one key-value head."""
    each, rest = divmod(heads, groups)
    if rest:
        raise PlacementError(
            f"{name}: expected its {heads} heads to be a multiple of the {groups} key-value heads beside it; such a "
            f"model cannot be cut over {axis}: leave out plan.placement.tensor"
        )
    if ranks <= groups:
        mine = deal(groups, ranks, index)
        return range(mine.start * each, mine.stop * each)
    copies, rest = divmod(ranks, groups)
    if rest:
        near = [groups * number for number in (copies, copies + 1) if number <= each]
        raise PlacementError(
            f"{name}: {groups} key-value heads over {axis} = {ranks}: expected at most {groups} ranks, or a multiple "
            f"of that, each with copies of one head{NEAREST}{axis} = {' or '.join(map(str, near))}"
        )
    group, copy = divmod(index, copies)
    mine = deal(each, copies, copy) if each > 1 else range(1)
    return range(group * each + mine.start, group * each + mine.stop)


def _too_few(name: str, axis: str, ranks: int, count: int, what: str) -> str:
    return (
        f"{name}: {count} {what} over {axis} = {ranks} leave some rank without any; "
        f"expected plan.placement.tensor.{axis} of at most {count}"
    )


def _refuse_empty(name: str, share: Share | None, size: int, what: str) -> None:
    if share is not None and any(share.extent(index) == 0 for index in range(len(share.runs))):
        raise PlacementError(_too_few(name, share.axis, len(share.runs), size, what))


def _settle(dealing: Dealing, name: str, cut: Cut) -> None:
    before = dealing.cuts.setdefault(name, cut)
    if before != cut:
        raise PlacementError(
            f"{name}: is used in two ways that would be cut differently over x and y; untie it, or leave out "
            "plan.placement.tensor"
        )


def _deal_table(dealing: Dealing, name: str, axis: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    rows, width = shapes[name]
    largest = max(shapes[table][0] for table in dealing.anatomy.embeddings)
    whole = axis == "y" or dealing.sizes["y"] == 1 or rows < dealing.sizes["y"] or rows * SMALL_TABLE <= largest
    columns = dealing.evenly(width, axis) if dealing.sizes[axis] > 1 else None
    _refuse_empty(name, columns, width, "columns")
    dealing.cuts[name] = Cut((rows, width), (None if whole else dealing.evenly(rows, "y"), columns))


def _deal_vector(dealing: Dealing, name: str, shapes: Mapping[str, tuple[int, ...]], raw: Raw, scope: str) -> None:
    """A weight that joins activations elementwise: one of its dims runs over the features, or it is one for all."""
    shape, axis = shapes[name], raw.axis
    if axis is None or dealing.sizes[axis] == 1:
        return
    if not raw.spans or not shape or shape[raw.dim] == 1:
        dealing.partial[name] = axis
        return
    shares: list[Share | None] = [None] * len(shape)
    share = shares[raw.dim] = dealing.beside(name, scope, axis, shape[raw.dim], heads=raw.heads)
    _refuse_empty(name, share, shape[raw.dim], "entries beside features")
    _settle(dealing, name, Cut(shape, tuple(shares)))
    if share.copies > 1:  # each copy of a head has the gradients of its own queries
        dealing.partial[name] = share


def experts_of(anatomy: Anatomy) -> dict[str, list[str]]:
    """Weights that hold the linears of all experts, by the module that reads them, first layers first."""
    found: dict[str, list[str]] = {}
    for name, linear in anatomy.linears.items():
        if linear.layout.startswith("expert"):
            found.setdefault(linear.module, []).append(name)
    return found


def vectors(dealing: Dealing, model: nn.Module) -> list[tuple[str, str | None]]:
    """Weights that join activations elementwise, with the axis of these."""
    norms = dealing.anatomy.norms.items()
    found = [(name, norm.axis) for path, norm in norms for name in _own(model, path, dealing.names)]
    return found + [(name, raw.axis) for name, raw in dealing.anatomy.raw.items()]


def bias_of(model: nn.Module, linear: Linear, names: Mapping[int, str]) -> str | None:
    """Name of the bias beside a linear's weight, if it has one."""
    bias = getattr(model.get_submodule(linear.module), "bias", None)
    return names.get(id(bias))
