"""Optimus' 2D algorithm on whole models (Xu et al. 2021): rows lie over z, features of everything over y.

Residual and inner features lie over the same axis, so a linear takes and gives what it is given over: its weight has
its output features over y and its input features over z, and is multiplied by SUMMA. Such a weight is cut over z as it
is: it is neither gathered nor scattered with the other weights of its block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fourfold import randomness
from fourfold.anatomy import Anatomy, Linear, Raw
from fourfold.placement.cut import Cut, Share
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor import traffic
from fourfold.placement.tensor.between import Between, Lines
from fourfold.placement.tensor.dealing import Dealing, experts_of
from fourfold.placement.tensor.executor import Switch
from fourfold.placement.tensor.experts import Exchange
from fourfold.placement.tensor.linears import Siblings
from fourfold.placement.tensor.rehearsal import Run
from fourfold.placement.tensor.summa import summa
from fourfold.placement.tensor.tables import TableExecutor
from fourfold.placement.tensor.traffic import Traffic
from fourfold.plan.grid import Grid
from fourfold.wire import Axis, ops
from fourfold.wire.formulas import shares


def on_one_axis(anatomy: Anatomy) -> Anatomy:
    """The same anatomy with everything that lies over x over y."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(moved, value))
        return "y" if value == "x" else value

    tables = {name: {key: moved(one) for key, one in getattr(anatomy, name).items()} for name in _TABLES}
    dropouts = tuple(dropout._replace(axis=moved(dropout.axis)) for dropout in anatomy.dropouts)
    exits = {path: tuple(map(moved, axes)) for path, axes in anatomy.exits.items()}
    outputs = tuple(map(moved, anatomy.outputs))
    return dataclasses.replace(anatomy, **tables, dropouts=dropouts, outputs=outputs, exits=exits)


_TABLES = ("linears", "embeddings", "norms", "raw", "whole", "shared", "beside")


def on_whole_tokens(anatomy: Anatomy) -> Anatomy:
    """The same anatomy with whole features wherever experts read or write those over x."""
    linears, raw, experts = dict(anatomy.linears), dict(anatomy.raw), experts_of(anatomy)
    for names in experts.values():
        for name in names:
            linear = linears[name]
            contract, output = (None if axis == "x" else axis for axis in (linear.contract, linear.output))
            linears[name] = linear._replace(contract=contract, output=output)
    for name, one in raw.items():
        if name.rpartition(".")[0] in experts and one.axis == "x":
            raw[name] = Raw(None, False)
    return dataclasses.replace(anatomy, linears=linears, raw=raw)


class Way(Between):
    """Linears between features over y and features over y are SUMMA's."""

    untiled = "2d and 2.5d cut every product into panels, which travel while others are multiplied"

    @classmethod
    def inside(cls, grid: Grid) -> Grid:
        """Panels of weights travel over z."""
        return dataclasses.replace(grid, copies=1)

    @classmethod
    def traffic(cls, lines: Lines, tokens: int, features: int, outputs: int, itemsize: int) -> Traffic:
        """Panels of the input and the output's gradient over y, of weights and their gradients over z."""
        across = lines.contract if lines.contract.name == "y" else lines.output
        here = outputs // across.size
        return traffic.summa(tokens, features, here, rows=lines.z, features=across, itemsize=itemsize)

    def siblings(self, linear: Linear, modules: Sequence[nn.Module], about: Mapping[str, Any]) -> Siblings:
        """One broadcast of the input for all."""
        if not _is_summa(linear):
            return self.plain(linear, modules, about)
        name = next(name for name, one in self.anatomy.linears.items() if one == linear)
        total = self.dealing.cuts[name].shape[linear.layout.split(",").index("in")]
        rows, features = self.mesh["z"], self.mesh["y"]
        return SummaSiblings(rows, total, modules, features, features, linear.layout, **about)

    @classmethod
    def seen(cls, anatomy: Anatomy) -> Anatomy:
        """All features lie over y, but those that experts read and write, which are whole."""
        return on_one_axis(on_whole_tokens(anatomy))

    def attach(self, model: nn.Module, switch: Switch) -> None:
        """Blocks are as they are."""

    def exchange(self, inner: Axis, features: int) -> Exchange:
        """Experts get all features of a token, and deal out their sums by features."""
        sizes = shares(features, inner.size)
        return Exchange(
            lambda tokens: ops.gather_scatter(tokens, inner, sizes=sizes),
            lambda parts: ops.scatter_gather(parts, inner, sizes=sizes),
        )

    def table(self, module: nn.Embedding, cut: Cut, switch: Switch) -> None:
        """One that is a linear's weight, too, lies as that does."""
        rows, columns = cut.shares
        if rows is None or columns is None or columns.axis != "z":
            return super().table(module, cut, switch)
        plane = self.mesh["y"], self.mesh["z"]
        TiedTable(switch, module, plane, rows.runs[plane[0].index][0], cut.shape[1])

    def share(self, dealing: Dealing, model: nn.Module) -> None:
        """Cut the input features of linears over z, in place of y.

        Raises:
            PlacementError: features that are not dealt evenly, or layers that SUMMA does not know.
        """
        for name, linear in self.anatomy.linears.items():
            if not linear.layout.startswith("expert") and linear.contract and model.get_parameter(name).dim() != 2:
                raise PlacementError(f"{name}: 2d multiplies plain matrices only; choose algorithm: 4d")
            if _is_summa(linear):
                dealing.cuts[name] = self._over_z(name, linear, dealing.cuts[name])

    def _over_z(self, name: str, linear: Linear, cut: Cut) -> Cut:
        dim, size = linear.layout.split(",").index("in"), self.mesh["y"].size
        before = cut.shares[dim]
        even = [(range(start, stop),) for start, stop in _spans(cut.shape[dim], size)]
        if before is not None and list(before.runs) != even:
            raise PlacementError(
                f"{name}: 2d: expected {cut.shape[dim]} input features in parts as even as can be over y = {size}, "
                "found whole heads of other sizes; choose a q that divides the heads, or algorithm: 4d"
            )
        shares_ = list(cut.shares)
        shares_[dim] = Share("z", tuple((range(start, stop),) for start, stop in _spans(cut.shape[dim], self.z)))
        return Cut(cut.shape, tuple(shares_))

    @property
    def z(self) -> int:
        """Ranks of z."""
        return self.mesh["z"].size

    def remember(self, dealing: Dealing, whole: Run) -> dict[str, randomness.Window]:
        """Rows are where z has them."""
        return {}


def _is_summa(linear: Linear) -> bool:
    return linear.contract == linear.output == "y"


def _spans(total: int, ranks: int) -> list[tuple[int, int]]:
    sizes = shares(total, ranks)
    return [(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(ranks)]


class SummaSiblings(Siblings):
    """Linears whose input features lie over y, and those of their weights over z.

    Attributes:
        rows: the axis z.
        total: input features of the whole layer.
    """

    def __init__(self, rows: Axis, total: int, *about: Any, **settings: Any) -> None:
        super().__init__(*about, **settings)
        self.rows, self.total = rows, total

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., features over y] → the same. Gradients of biases are of this rank's rows, like those of norms."""
        weights: list[Any] = [module.weight for module in self.modules]
        about: dict[str, Any] = {"rows": self.rows, "features": self.output, "total": self.total}
        found = summa(
            x,
            weights,
            [None for _ in weights],
            **about,
            layout=self.layout,
            overlap=self.tuning.overlap,
            kernels=self.tuning.kernels,
        )
        pairs = zip(found, self.biases, strict=True)
        return tuple(one if bias is None else one + bias for one, bias in pairs)


class TiedTable(TableExecutor):
    """An embedding that is a linear's weight, too: rows over y, columns over z.

    Columns are gathered over z; every rank looks up its rows, and the sum over y is dealt out by features.

    Attributes:
        columns: the axis z.
        width: columns of the whole table.
    """

    def __init__(self, switch: Switch, module: nn.Module, plane: tuple[Axis, Axis], rows: range, width: int) -> None:
        super().__init__(switch, module, plane[0], rows)
        self.columns, self.width = plane[1], width

    def table(self, weight: Tensor) -> Tensor:
        """All columns of the rows that are here."""
        return ops.gather_scatter(weight, self.columns, "weight", dim=1, sizes=shares(self.width, self.columns.size))

    def joined(self, found: Tensor) -> Tensor:
        """Of the sum, the features that are here."""
        return ops.scatter_gather(found, self.axis, "embedding", dim=-1, sizes=shares(self.width, self.axis.size))
