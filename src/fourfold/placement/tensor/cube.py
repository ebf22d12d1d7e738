"""The 3D algorithm's activations (Bian et al. 2021): besides features, batch rows are cut over the axis left idle.

In the residual, whose features lie over x, rows lie over y; between a block's first and last linears, where features
lie over y, rows lie over x. A linear gathers rows over the axis of its output features and scatters its sum over that
of its input features, so no activation lies on a rank twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from fourfold import randomness
from fourfold.anatomy import Linear
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor import traffic
from fourfold.placement.tensor.between import Between, GatheringExecutor, Lines
from fourfold.placement.tensor.dealing import Dealing
from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.placement.tensor.experts import Exchange
from fourfold.placement.tensor.linears import Siblings
from fourfold.placement.tensor.places import with_rows
from fourfold.placement.tensor.regions import on_first
from fourfold.placement.tensor.rehearsal import Run, Stage
from fourfold.placement.tensor.traffic import Traffic
from fourfold.plan.grid import Grid
from fourfold.torch_private import map_leaves
from fourfold.wire import Axis, Mesh, ops


class Cube:
    """How the rows of the micro-batch being computed are dealt.

    Attributes:
        across: axis that the rows of the residual lie over (y).
        inner: axis that rows lie over between a block's linears (x).
        rows: of the whole micro-batch on this z and data.
    """

    def __init__(self, across: Axis, inner: Axis) -> None:
        self.across, self.inner = across, inner
        self.rows = 0

    def begin(self, x: Tensor) -> Tensor:
        """This rank's rows of what the first block is given.

        Raises:
            PlacementError: its rows do not divide.
        """
        self.rows = x.shape[0]
        if self.rows % self.across.size:
            raise PlacementError(
                f"plan.placement.tensor: 3d cuts batch rows over {self.across.size} ranks: expected a number of rows "
                f"of a micro-batch on a rank of z and data that divides, found {self.rows}; choose another batch size, "
                "or algorithm: 4d"
            )
        return ops.cut_gather(x, self.across, dim=0)

    def whole(self, x: Tensor) -> Tensor:
        """All rows, for what every rank of y computes alike; what the last block gives."""
        return ops.gather_cut(x, self.across, dim=0)

    def own(self, value: Tensor) -> Tensor:
        """Of a mask, or another tensor of whole rows beside the activations, those of this rank between linears."""
        return value.chunk(self.inner.size)[self.inner.index]


class Way(Between):
    """Batch rows lie over the axis over which features do not."""

    deals_tokens = True
    recuts = ("y", "x")

    def __init__(self, mesh: Mesh, dealing: Dealing) -> None:
        super().__init__(mesh, dealing)
        self.cube = Cube(mesh["y"], mesh["x"])

    @classmethod
    def traffic(cls, lines: Lines, tokens: int, features: int, outputs: int, itemsize: int) -> Traffic:
        """Rows gathered over the axis of the outputs, sums scattered over that of the inputs."""
        contract, output = lines.contract, lines.output
        here = features // contract.size, outputs // output.size
        about: dict[str, Any] = {"contract": contract, "output": output, "itemsize": itemsize}
        return traffic.product(tokens, *here, **about, sequence=True, keep=True)

    @classmethod
    def example(cls, batch: Mapping[str, Tensor], grid: Grid) -> Mapping[str, Tensor]:
        """One row has none to deal."""
        return {name: torch.cat([tensor] * grid.y) for name, tensor in batch.items()}

    def look(self, stage: Stage) -> None:
        """Which tensors beside the activations have rows."""
        self.places.rows.update(with_rows(stage, self.anatomy, self.first_halves()))

    def extents(self) -> tuple[int, ...]:
        """Rows."""
        return (self.cube.rows,)

    def resume(self, extents: tuple[int, ...]) -> None:
        """Set what `extents` gave."""
        (self.cube.rows,) = extents

    def siblings(self, linear: Linear, modules: Sequence[nn.Module], about: Mapping[str, Any]) -> Siblings:
        """Linears of blocks gather rows and scatter their sums."""
        if self.block_of(linear.module) is None or linear.role == "reducing":
            return self.plain(linear, modules, about)
        return CubeSiblings(modules, self.axis(linear.contract), self.axis(linear.output), linear.layout, **about)

    def attach(self, model: nn.Module, switch: Switch) -> None:
        """The first block begins with this rank's rows, the last one ends with all."""
        for path in self.first_halves():
            CubeInside(switch, model.get_submodule(path), self.cube, self.places.rows.get(path, frozenset()))
        for path in self.routers():
            GatheringExecutor(switch, model.get_submodule(path), self.cube.whole)
        self.edges(model, switch, self.cube.begin, self.cube.whole)

    def exchange(self, inner: Axis, features: int) -> Exchange:
        """Experts get the tokens of all rows, and deal out their sums: a token's rank between their layers is any."""
        return Exchange(
            lambda tokens: ops.gather_scatter(tokens, inner, dim=0),
            lambda parts: ops.scatter_gather(parts, inner, dim=0),
        )

    def share(self, dealing: Dealing, model: nn.Module) -> None:
        """Vectors that join activations; biases are added where rows have been gathered in backward."""
        self.refuse_tokens("3d", "4d")
        for name, axis in self.vectors(dealing, model):
            idle = "y" if axis == "x" else "x"
            dealing.partial[name] = "x+y" if name in dealing.partial else idle
        dealing.partial |= dict.fromkeys(self.reducing(model), "y")

    def remember(self, dealing: Dealing, whole: Run) -> dict[str, randomness.Window]:
        """Shapes of blocks have a part of the rows, and dropouts draw for it."""
        for size in sorted({shape[0] for made in whole.made for shape in made.shapes if shape}):
            if size % self.cube.rows == 0:
                dealing.evenly(size, "y")
                dealing.evenly(size, "x")
        windows: dict[str, randomness.Window] = {}
        for dropout in self.anatomy.dropouts:
            if self.block_of(f"{dropout.module}.") is not None:
                axis = self.cube.across if dropout.axis == "x" else self.cube.inner
                windows[dropout.site] = randomness.Window(axis.index, axis.size)
        return windows


class CubeSiblings(Siblings):
    """Linears that gather rows over `output` and leave them cut over `contract`."""

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        """[rows over `output`, ..., features here] → [rows over `contract`, ..., features here]."""
        return self.product(x, self.biases, rows=0, keep=True)


class CubeInside(Executor):
    """A module with a block's first linears: what comes beside the activations has all rows.

    Attributes:
        rows: places of tensors that have rows among those that it is given.
    """

    def __init__(self, switch: Switch, module: nn.Module, cube: Cube, rows: frozenset[int]) -> None:
        super().__init__(switch, module)
        self.cube, self.rows = cube, rows

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Leave the activations, the first floating tensor, alone."""
        kept: list[Tensor] = []
        on_first(kept.append, (args, kwargs))
        places = count()

        def own(value: Any) -> Any:
            if not isinstance(value, Tensor) or next(places) not in self.rows or (kept and value is kept[0]):
                return value
            return self.cube.own(value)

        args, kwargs = map_leaves(own, (args, kwargs))
        return self.inner(*args, **kwargs)
