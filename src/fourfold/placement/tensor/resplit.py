"""Rows for features: a module that nobody can split is computed once on x · y ranks, and not on each of them.

A module that runs whole (`regions.py`) has its input gathered, and all ranks of x and y compute the same. Here each of
them computes its share of the batch rows with the whole weights. On the way in, rows are cut over the axis over which
no features lie (nothing is sent) and traded for features over the other one (an all-to-all); on the way out, features
that others keep are traded for their rows, and rows are gathered over the other axis. Backward is the transpose. Every
rank knows all row counts from the shape, so nobody asks, and no device waits for its host. The gradients of the
module's weights are sums over x and y.

Elements that a rank sends for K features in and N out on m = M/(xy) rows, where they lie over x both times:

    forward   (x-1)/x mK                 (x-1)/x mN + (y-1) mN
    backward  (x-1)/x mK + (y-1) mK      (x-1)/x mN

The two ways are those of AxoNN's "easy" layers too (Singh et al. 2023; `axonn.intra_layer`), whose batch is split
outside of a split linear: there rows become features before it, and features rows after it. AxoNN trades before it
slices and so sends (R-1)/R (C-1) mN more each way, C and R being its ranks over input and output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold import randomness
from fourfold.anatomy import Anatomy
from fourfold.anatomy.wholes import alike
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.dealing import Dealing
from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.placement.tensor.regions import Sum, has_features, is_integral
from fourfold.placement.tensor.rowwise import NO_TENSOR, Held, Rowwise, within
from fourfold.plan.grid import Grid
from fourfold.torch_private import leaves, map_leaves
from fourfold.wire import Axis, Mesh, ops
from fourfold.wire.formulas import shares

Counts = Sequence[Sequence[int]]


class Lying(NamedTuple):
    """Over which axis a tensor's features lie, and how many every rank has of them."""

    axis: Axis
    sizes: Sequence[int]

    def has(self, value: Any, here: bool) -> bool:
        """Whether this is a tensor of such features: of those here, or of all."""
        return has_features(value, self.sizes[self.axis.index] if here else sum(self.sizes))


class Resplit:
    """How the rows of the micro-batch being computed are dealt over x and y: x fastest, the first ranks one more.

    Attributes:
        x, y: axes of the mesh.
        rows: of the micro-batch on this rank of z and data.
    """

    def __init__(self, x: Axis, y: Axis) -> None:
        self.x, self.y = x, y
        self.rows = 0

    @property
    def ranks(self) -> int:
        """Among which rows are dealt."""
        return self.x.size * self.y.size

    @property
    def window(self) -> randomness.Window:
        """Which part of the rows is this rank's."""
        return randomness.Window(self.x.index + self.x.size * self.y.index, self.ranks)

    def own(self, value: Tensor, held: Held, lying: Lying | None = None) -> Tensor:
        """This rank's rows with all features. In backward, of all rows the features that lie here.

        Args:
            value: all rows; of the features those that lie here.
            held: where the rows are in it.
            lying: how its features lie; None: all are here.
        """
        counts = self._counts(held)
        if lying is not None and lying.axis is self.y:
            value, counts, first, last = _turned(value, held.dim, counts), _transposed(counts), self.x, self.y
        else:
            first, last = self.y, self.x
        value = ops.cut_gather(value, first, dim=held.dim, sizes=[sum(row) for row in counts])
        mine = counts[first.index]
        if lying is None:
            return ops.cut_gather(value, last, dim=held.dim, sizes=mine)
        return ops.trade(value, last, cut=held.dim, joined=-1, cuts=mine, joins=lying.sizes)

    def all(self, value: Tensor, held: Held, lying: Lying | None = None) -> Tensor:
        """All rows, and of the features those that are to lie here. In backward, this rank's rows with all features.

        Args:
            value: this rank's rows with all features.
            held: where the rows are in it.
            lying: how its features are to lie; None: all here.
        """
        counts, first, last = self._counts(held), self.y, self.x
        if lying is not None and lying.axis is self.y:
            counts, first, last = _transposed(counts), self.x, self.y
        mine = counts[first.index]
        if lying is None:
            value = ops.gather_cut(value, last, dim=held.dim, sizes=mine)
        else:
            value = ops.trade(value, last, cut=-1, joined=held.dim, cuts=lying.sizes, joins=mine)
        value = ops.gather_cut(value, first, dim=held.dim, sizes=[sum(row) for row in counts])
        return value if last is self.x else _turned(value, held.dim, counts)

    def _counts(self, held: Held) -> Counts:
        """Entries of the dim that the ranks have, by their indices on y and x.

        Raises:
            PlacementError: some would have none.
        """
        if self.rows < self.ranks:
            raise PlacementError(
                f"plan.placement.tensor.by_rows: expected a row of the micro-batch for each of {self.ranks} ranks of "
                f"x and y, found {self.rows} rows on a rank of z and data; choose a larger batch, or leave by_rows out"
            )
        dealt = [rows * held.each for rows in shares(self.rows, self.ranks)]
        return [dealt[at : at + self.x.size] for at in range(0, self.ranks, self.x.size)]


def _transposed(counts: Counts) -> Counts:
    return list(zip(*counts, strict=True))


def _turned(value: Tensor, dim: int, counts: Counts) -> Tensor:
    """Blocks of `counts[i][j]` entries of the dim, j fastest, put in the order in which i is."""
    if 1 in (len(counts), len(counts[0])):
        return value
    blocks = value.split([count for row in counts for count in row], dim)
    width = len(counts[0])
    return torch.cat([block for j in range(width) for block in blocks[j::width]], dim)


class ResplitExecutor(Executor):
    """A module that nobody knows how to split, on this rank's rows.

    Attributes:
        path: of the module.
        rowwise: where the rows are in the tensors that it is given, and gives.
        resplit: how they are dealt.
        given: how the features of its inputs lie; None: they are whole.
        made: how those of its outputs are to lie; None: they stay whole.
        both: x and y as one axis.
        sums: by place among its floating outputs, what ranks use for split features where the outputs stay whole.
    """

    def __init__(
        self,
        switch: Switch,
        module: nn.Module,
        path: str,
        rowwise: Rowwise,
        resplit: Resplit,
        given: Lying | None,
        made: Lying | None,
        both: Axis,
        sums: Mapping[int, Sum],
    ) -> None:
        super().__init__(switch, module)
        self.path, self.rowwise, self.resplit = path, rowwise, resplit
        self.given, self.made, self.both, self.sums = given, made, both, sums

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's rows of every tensor, the module, all rows of what it gives."""
        places = count()

        def whole(value: Tensor, held: Held | None) -> Tensor:
            assert held is not None  # `rowwise.find` refuses outputs without rows
            place = -1 if is_integral(value) else next(places)
            if place in self.sums:
                return self.sums[place].of(self.resplit.all(value, held))
            lying = self.made if self.made is not None and self.made.has(value, here=False) else None
            return self.resplit.all(value, held, lying)

        args, kwargs = self._changed(self._own, (args, kwargs), self.rowwise.given, "is given")
        return self._changed(whole, self.inner(*args, **kwargs), self.rowwise.gave, "gives")

    def _changed(self, change: Callable[..., Tensor], value: Any, held: Sequence[Held | None], verb: str) -> Any:
        found = [isinstance(leaf, Tensor) for leaf in leaves(value)]
        if len(found) != len(held) or any(there and one is NO_TENSOR for there, one in zip(found, held, strict=True)):
            raise PlacementError(
                f"{self.path}: {verb} other tensors than with the example batch, which says where rows are; give an "
                "example like the batches to come, or leave it out of plan.placement.tensor.by_rows"
            )
        places = iter(held)

        def visit(leaf: Any) -> Any:
            place = next(places)
            return change(leaf, place) if isinstance(leaf, Tensor) else leaf

        return map_leaves(visit, value)

    def _own(self, value: Tensor, held: Held | None) -> Tensor:
        lying = self.given if self.given is not None and self.given.has(value, here=True) else None
        if held is not None:
            return self.resplit.own(value, held, lying)
        if lying is not None:
            value = ops.gather_cut(value, lying.axis, sizes=lying.sizes)
        # What every row reads has a gradient from each: the ranks' rows give parts of it.
        return ops.identity_sum(value, self.both) if value.requires_grad else value


class RowsExecutor(Executor):
    """The whole model: notes how many rows it is given."""

    def __init__(self, switch: Switch, module: nn.Module, rowwise: Rowwise, resplit: Resplit) -> None:
        super().__init__(switch, module)
        self.resplit = resplit
        known = ((place, held) for place, held in enumerate(rowwise.given) if held not in (None, NO_TENSOR))
        self.place, self.held = next(known)

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        given = list(leaves((args, kwargs)))[self.place]
        self.resplit.rows = given.shape[self.held.dim] // self.held.each
        return self.inner(*args, **kwargs)


# ---- before anything is allocated


def chosen(anatomy: Anatomy, grid: Grid) -> tuple[str, ...]:
    """Paths of the modules that the plan wants computed by rows, and of those that are alike in other blocks.

    Args:
        anatomy: by a survey in which these were to run whole.

    Raises:
        PlacementError: a pattern that fits no module that runs whole.
    """
    wanted: set[str] = set()
    for pattern in grid.by_rows if grid.cuts_features else ():
        fitting = {alike(path) for path in anatomy.whole if fnmatchcase(path, pattern)}
        if not fitting:
            raise PlacementError(
                f"plan.placement.tensor.by_rows: expected modules inside of blocks, or beside them, that are no norms, "
                f"found none that {pattern!r} fits; leave it out"
            )
        wanted |= fitting
    return tuple(path for path in anatomy.whole if alike(path) in wanted)


def share(dealing: Dealing, model: nn.Module, paths: Sequence[str]) -> None:
    """The gradients of these modules' weights are of a part of the rows."""
    for path in paths:
        for weight in model.get_submodule(path).parameters():
            dealing.partial[dealing.names[id(weight)]] = "x+y"


def windows(mesh: Mesh, anatomy: Anatomy, paths: Sequence[str]) -> dict[str, randomness.Window]:
    """By site, of which part of the rows a dropout in one of these modules is."""
    window = Resplit(mesh["x"], mesh["y"]).window
    return {dropout.site: window for dropout in anatomy.dropouts if any(within(dropout.module, path) for path in paths)}


def example(batch: Mapping[str, Tensor], grid: Grid) -> dict[str, Tensor]:
    """A batch to rehearse with: a row for every rank of x and y."""
    return {name: torch.cat([tensor] * (grid.x * grid.y)) for name, tensor in batch.items()}
