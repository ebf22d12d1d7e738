"""What becomes of rows and time between a block's linears, where only features are cut by the grid itself."""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import lcm
from typing import Any, NamedTuple

from torch import Tensor, nn

from fourfold import randomness
from fourfold.anatomy import Anatomy, Linear
from fourfold.placement.cut import Cut
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor import traffic
from fourfold.placement.tensor.dealing import Dealing, bias_of, experts_of, vectors
from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.placement.tensor.experts import Exchange
from fourfold.placement.tensor.linears import Siblings
from fourfold.placement.tensor.places import Places
from fourfold.placement.tensor.regions import on_first
from fourfold.placement.tensor.rehearsal import Run, Stage
from fourfold.placement.tensor.tables import TableExecutor
from fourfold.placement.tensor.traffic import Ranks, Traffic
from fourfold.plan import Placement
from fourfold.plan.grid import Grid
from fourfold.wire import Axis, Mesh, ops

Change = Callable[[Tensor], Tensor]


class Lines(NamedTuple):
    """Ranks along the axes that a linear sums over, that its outputs lie over, and that rows are cut over."""

    contract: Ranks
    output: Ranks
    z: Ranks


class Between(ABC):
    """Activations of a block besides their features.

    Attributes:
        mesh: this rank's, or a dry one.
        dealing: the cuts of all weights.
        anatomy: of the model.
        places: which of the tensors that modules are given have rows.
        deals_tokens: blocks are given a part of the rows or of time; the first and the last one deal and gather.
        recuts: axes over which a rank's rows are cut once more.
        untiled: why products cannot be cut into chunks that travel, in words; empty if they can.
    """

    deals_tokens = False
    recuts: tuple[str, ...] = ()
    untiled = ""

    def __init__(self, mesh: Mesh, dealing: Dealing) -> None:
        self.mesh, self.dealing, self.anatomy = mesh, dealing, dealing.anatomy
        self.places = Places()

    @classmethod
    def seen(cls, anatomy: Anatomy) -> Anatomy:
        """The anatomy with the axes as this way has them."""
        return anatomy

    @classmethod
    def inside(cls, grid: Grid) -> Grid:
        """The grid as a forward and backward know it: without the axes over which only whole units travel."""
        return dataclasses.replace(grid, z=1, copies=1)

    @classmethod
    def traffic(cls, lines: Lines, tokens: int, features: int, outputs: int, itemsize: int) -> Traffic:
        """What a linear sends in one micro-batch, in closed form; weights that travel whole are not in it.

        Args:
            lines: the axes as a linear sees them.
            tokens: of this rank of z and data.
            features, outputs: of the whole layer, dealt evenly.
        """
        contract, output = lines.contract, lines.output
        here = features // contract.size, outputs // output.size
        return traffic.product(tokens, *here, contract=contract, output=output, itemsize=itemsize)

    @classmethod
    def example(cls, batch: Mapping[str, Tensor], grid: Grid) -> Mapping[str, Tensor]:
        """A batch to rehearse with, made of one row or a few."""
        return batch

    def look(self, stage: Stage) -> None:  # noqa: B027 - most need to know nothing
        """Before a rehearsal: find out of the plain model what a way must know (`places`)."""

    @abstractmethod
    def siblings(self, linear: Linear, modules: Sequence[nn.Module], about: Mapping[str, Any]) -> Siblings:
        """The product of linears that read the same tensor.

        Args:
            linear: the first of them.
            modules: which compute it.
            about: further settings of `Siblings`.
        """

    @abstractmethod
    def attach(self, model: nn.Module, switch: Switch) -> None:
        """Take over blocks, and modules in them, whose inputs or outputs change."""

    @abstractmethod
    def share(self, dealing: Dealing, model: nn.Module) -> None:
        """Note which weights have gradients of a part of the rows or of time.

        Raises:
            PlacementError: the model has no blocks in a row, or something in them that looks across what is cut.
        """

    @abstractmethod
    def remember(self, dealing: Dealing, whole: Run) -> dict[str, randomness.Window]:
        """After a rehearsal: how what was seen is dealt; by site, of which part of the rows a dropout is."""

    def extents(self) -> tuple[int, ...]:
        """By what the micro-batch being computed is dealt, as the first block found it."""
        return ()

    def resume(self, extents: tuple[int, ...]) -> None:
        """A part of the model runs that does not begin with the first block, or backward of an earlier forward."""
        assert not extents

    def exchange(self, inner: Axis, features: int) -> Exchange:
        """How tokens reach experts.

        Args:
            inner: axis that the experts' inner features lie over.
            features: that a token has here when it has entered.
        """
        return Exchange(lambda tokens: ops.identity_sum(tokens, inner), lambda parts: ops.sum_identity(parts, inner))

    def table(self, module: nn.Embedding, cut: Cut, switch: Switch) -> None:
        """Take over an embedding, if its rows are cut: each rank looks up what it holds."""
        share, _ = cut.shares
        if share is not None:
            axis = self.mesh[share.axis]
            TableExecutor(switch, module, axis, share.runs[axis.index][0])

    # ---- what all of them ask

    def axis(self, name: str | None) -> Axis:
        """An axis; where features are whole, one of a single rank."""
        return self.mesh.over() if name is None else self.mesh[name]

    def block_of(self, path: str) -> str | None:
        """The block that a module is in."""
        return next((block for block in self.anatomy.blocks if path.startswith(f"{block}.")), None)

    def first_halves(self) -> list[str]:
        """Paths of the modules that hold a block's first linears: an attention, an MLP."""
        linears = self.anatomy.linears.values()
        first = (one.module for one in linears if one.output == "y" and not one.layout.startswith("expert"))
        return list(dict.fromkeys(_parent(path) for path in first if self.block_of(_parent(path)) is not None))

    def edges(self, model: nn.Module, switch: Switch, begin: Change, end: Change) -> None:
        """Cut what the first block is given, and make whole what the last one gives."""
        first, last = self.anatomy.blocks[0], self.anatomy.blocks[-1]
        for path in dict.fromkeys((first, last)):
            about = begin if path == first else None, end if path == last else None
            EdgeExecutor(switch, model.get_submodule(path), *about)

    def plain(self, linear: Linear, modules: Sequence[nn.Module], about: Mapping[str, Any]) -> Siblings:
        """Of rows that every rank has all of."""
        return Siblings(modules, self.axis(linear.contract), self.axis(linear.output), linear.layout, **about)

    def vectors(self, dealing: Dealing, model: nn.Module) -> list[tuple[str, str | None]]:
        """Weights in blocks that join activations elementwise, with the axis of these; not those of experts, which see
        all rows and all time."""
        found = [(name, axis) for name, axis in vectors(dealing, model) if self.block_of(name) is not None]
        return [(name, axis) for name, axis in found if _parent(name) not in experts_of(self.anatomy)]

    def routers(self) -> list[str]:
        """Modules beside experts that run whole, and what they give stays whole: they choose among all tokens."""
        beside = {_parent(path) for path in experts_of(self.anatomy)}
        return [path for path, whole in self.anatomy.whole.items() if whole.output is None and _parent(path) in beside]

    def reducing(self, model: nn.Module) -> list[str]:
        """Weights and biases in blocks of linears with a single feature out, which read the residual."""
        found: list[str] = []
        for name, linear in self.anatomy.linears.items():
            if linear.role == "reducing" and linear.contract == "x" and self.block_of(name) is not None:
                bias = bias_of(model, linear, self.dealing.names)
                found += [name] if bias is None else [name, bias]
        return found

    def refuse_tokens(self, algorithm: str, other: str) -> None:
        """What rows or time cannot be dealt in.

        Raises:
            PlacementError: blocks in several places, something that runs whole in them and is no router, or experts
                inside of a module that has all rows and all time anyway.
        """
        places = len({_parent(path) for path in self.anatomy.blocks})
        if places != 1:
            raise PlacementError(
                f"plan.placement.tensor: {algorithm}: expected blocks in one row, each of which gives what the next "
                f"one is given, found {len(self.anatomy.blocks)} blocks in {places} places; choose algorithm: {other}"
            )
        routers = self.routers()
        for path in self.anatomy.whole:
            if self.block_of(path) is not None and path not in routers:
                raise PlacementError(
                    f"{path}: runs on whole features, and {algorithm} deals rows or time to blocks: expected nothing "
                    f"of the kind in a block but what chooses experts; choose algorithm: {other}"
                )
        for path in experts_of(self.anatomy):
            around = next((half for half in self.first_halves() if path.startswith(f"{half}.")), None)
            if around is not None:
                raise PlacementError(
                    f"{path}: experts inside of {around}, which holds a linear that reads the same tokens: {algorithm} "
                    f"would deal them twice; choose algorithm: {other}"
                )


def way_of(grid: Grid) -> type[Between]:
    """The class that a grid names."""
    return importlib.import_module(f"fourfold.placement.tensor.{grid.between}").Way


def refuse_rows(placement: Placement, rows: int, microbatches: int) -> None:
    """Refuse a global batch that the plan's grid cannot deal; by numbers alone, so on every rank alike.

    Rows that are cut once more are cut evenly; ranks' rows differ by one or not at all, so all must be equal.

    Args:
        rows: of the global batch.
        microbatches: into which they are cut first; then over the ranks of z and data.

    Raises:
        PlacementError: says over which axes, how many rows there are, and the nearest batch sizes that fit.
    """
    grid, parts = placement.grid, placement.parts
    sizes = {axis: getattr(grid, axis) for axis in way_of(grid).recuts} if grid.cuts_features else {}
    each = microbatches * parts * lcm(*sizes.values())
    if not sizes or rows % each == 0:
        return
    near = [str(size) for size in (rows // each * each, -(-rows // each) * each) if size]
    first = f"{microbatches} micro-batches, " if microbatches > 1 else ""
    more = " and ".join(f"{axis} = {size}" for axis, size in sizes.items())
    algorithm = placement.tensor.spelling if placement.tensor else "this grid"
    raise PlacementError(
        f"plan.placement.tensor: {algorithm} cuts the rows of a batch "
        f"over {first}{parts} ranks of z and data, and what each of these has over {more}: expected a multiple of "
        f"{each} rows, found {rows}; nearest batch sizes that fit: {' and '.join(near)}. Take one of them, or "
        "algorithm: 4d"
    )


class EdgeExecutor(Executor):
    """The first block, or the last one, or one that is both: rows or time are cut from the one to the other."""

    def __init__(self, switch: Switch, module: nn.Module, begin: Change | None, end: Change | None) -> None:
        """Change the first floating tensor that the block is given by `begin`, and the first that it gives by `end`."""
        super().__init__(switch, module)
        self.begin, self.end = begin, end

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """The block, between whatever is to be done at its ends."""
        if self.begin is not None:
            args, kwargs = on_first(self.begin, (args, kwargs))
        found = self.inner(*args, **kwargs)
        return found if self.end is None else on_first(self.end, found)


class GatheringExecutor(Executor):
    """A module that computes on all rows and all time steps: it is given those of this rank."""

    def __init__(self, switch: Switch, module: nn.Module, gather: Change) -> None:
        super().__init__(switch, module)
        self.gather = gather

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the first floating tensor."""
        args, kwargs = on_first(self.gather, (args, kwargs))
        return self.inner(*args, **kwargs)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
