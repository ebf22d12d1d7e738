"""Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): between linears, time lies over y.

On the 1D algorithm the residual is whole on every rank of y: norms, dropouts and sums are computed y times. Here each
rank has a part of the time steps from the first block's beginning to the last one's end. The module that holds an
attention's or an MLP's first linears gets all of them, gathered; its last linear sums and deals them out again: a
gather and a scatter where there was a sum, so as many bytes, and activations between take a y-th of the memory.

What the gather brings is not kept for the weights' gradients: each rank keeps its own part of the time steps, and
gathers again in backward, while the gradient of the input is computed. `sequence_kept` keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from fourfold import randomness
from fourfold.anatomy import Linear
from fourfold.placement.cut import Share, deal
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.between import Between, GatheringExecutor
from fourfold.placement.tensor.dealing import Dealing, bias_of
from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.placement.tensor.experts import Exchange
from fourfold.placement.tensor.linears import Siblings
from fourfold.placement.tensor.product import product
from fourfold.placement.tensor.regions import on_first
from fourfold.placement.tensor.rehearsal import Run
from fourfold.plan.grid import Grid
from fourfold.wire import Axis, Mesh, ops
from fourfold.wire.formulas import shares


class Time:
    """How the time steps of the micro-batch being computed are dealt.

    Attributes:
        axis: over which.
        rows, steps: of the whole tensor [rows, steps, features] that the first block is given.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.rows = self.steps = 0
        self._given: tuple[Tensor, Tensor] | None = None

    def begin(self, x: Tensor) -> Tensor:
        """This rank's time steps of what the first block is given.

        Raises:
            PlacementError: it is no tensor of [rows, steps, features].
        """
        if x.dim() != 3:
            raise PlacementError(
                f"plan.placement.tensor: 1d-sequence cuts time: expected blocks that are given [rows, time, features], "
                f"found {list(x.shape)}. The first floating tensor among the arguments of a block (by place, then by "
                "name) is taken for its activations: put these before masks and biases, or choose algorithm: 1d"
            )
        self.rows, self.steps = x.shape[:2]
        return ops.cut_gather(x, self.axis, dim=1, sizes=self.sizes())

    def whole(self, x: Tensor) -> Tensor:
        """All time steps, for what every rank computes alike; what the last block gives."""
        return self._changed(ops.gather_cut, x)

    def gathered(self, x: Tensor) -> Tensor:
        """All time steps; in backward their gradients are summed and dealt out again."""
        return self._changed(ops.gather_scatter, x)

    @contextmanager
    def lent(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """A `gathered` for one call of a module, in which it is known of which own time steps all are."""

        def gathered(x: Tensor) -> Tensor:
            found = self.gathered(x)
            self._given = (x, found) if x.dim() == 3 else None
            return found

        try:
            yield gathered
        finally:
            self._given = None

    def own(self, x: Tensor) -> Tensor | None:
        """The time steps of this rank, if `x` is what the module that runs was given of all ranks'."""
        return self._given[0] if self._given is not None and self._given[1] is x else None

    def scattered(self, x: Tensor) -> Tensor:
        """The sum over the axis of this rank's time steps; in backward their gradients are gathered."""
        return self._changed(ops.scatter_gather, x)

    def _changed(self, exchange: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Of [rows, time, features], or of tokens [rows · time, features]."""
        rows = x if x.dim() == 3 else x.unflatten(0, (self.rows, -1))
        found = exchange(rows, self.axis, dim=1, sizes=self.sizes())
        return found if x.dim() == 3 else found.flatten(0, 1)

    def sizes(self) -> list[int]:
        """Every rank's time steps."""
        return shares(self.steps, self.axis.size)

    def runs(self) -> list[range]:
        """Every rank's time steps."""
        return [deal(self.steps, self.axis.size, index) for index in range(self.axis.size)]


class Way(Between):
    """Time lies over y between a block's linears."""

    deals_tokens = True
    kept = False
    """What is gathered is kept for backward."""

    def __init__(self, mesh: Mesh, dealing: Dealing) -> None:
        super().__init__(mesh, dealing)
        self.time = Time(mesh["y"])

    @classmethod
    def example(cls, batch: Mapping[str, Tensor], grid: Grid) -> Mapping[str, Tensor]:
        """One row: where tokens of several lie in one dim, those of a part of time are no run of it."""
        return {name: tensor[:1] for name, tensor in batch.items()}

    def extents(self) -> tuple[int, ...]:
        """Rows and time steps."""
        return self.time.rows, self.time.steps

    def resume(self, extents: tuple[int, ...]) -> None:
        """Set what `extents` gave."""
        self.time.rows, self.time.steps = extents

    def siblings(self, linear: Linear, modules: Sequence[nn.Module], about: Mapping[str, Any]) -> Siblings:
        """Gathers and scatters of time are the sums over y."""
        block, nobody = self.block_of(linear.module), self.axis(None)
        if block is None:
            return self.plain(linear, modules, about)
        if linear.contract == "y":
            return Scattering(self.time, modules, nobody, self.axis(linear.output), linear.layout, **about)
        contract = self.axis(linear.contract)
        if linear.module.rpartition(".")[0] == block:  # no module between that could gather for it
            return Gathering(self.time, self.kept, modules, contract, nobody, linear.layout, **about)
        again = Siblings if self.kept else partial(Regathering, self.time)
        return again(modules, contract, nobody, linear.layout, **about)

    def attach(self, model: nn.Module, switch: Switch) -> None:
        """The first block begins with this rank's time, the last one ends with all; between, linears have all."""
        for path in self.first_halves():
            LendingExecutor(switch, model.get_submodule(path), self.time)
        for path in self.routers():
            GatheringExecutor(switch, model.get_submodule(path), self.time.whole)
        self.edges(model, switch, self.time.begin, self.time.whole)

    def exchange(self, inner: Axis, features: int) -> Exchange:
        """Experts get all tokens, and deal out their sums."""
        return Exchange(self.time.gathered, self.time.scattered)

    def share(self, dealing: Dealing, model: nn.Module) -> None:
        """Norms, other vectors and last biases of blocks; what lies inside an attention sees all time steps."""
        self.refuse_tokens("1d-sequence", "1d")
        for name in self.reducing(model):
            around = next((half for half in self.first_halves() if name.startswith(f"{half}.")), None)
            if around is not None:
                raise PlacementError(
                    f"{name}: gives one number to all features of {around}, which has all time steps: 1d-sequence "
                    "cannot tell whose gradient it is; choose algorithm: 1d"
                )
        names = [name for name, axis in self.vectors(dealing, model) if axis == "x"]
        last = (linear for linear in self.anatomy.linears.values() if linear.contract == "y")
        biases = (bias_of(model, linear, dealing.names) for linear in last)
        names += [bias for bias in biases if bias is not None and self.block_of(bias) is not None]
        names += self.reducing(model)
        dealing.partial |= dict.fromkeys(names, "y")

    def remember(self, dealing: Dealing, whole: Run) -> dict[str, randomness.Window]:
        """Shapes have a part of the time steps; rows stay where they are."""
        for each, total in ((1, self.time.steps), (self.time.rows, self.time.rows * self.time.steps)):
            runs = [range(each * mine.start, each * mine.stop) for mine in self.time.runs()]
            dealing.remember(Share("y", tuple((run,) for run in runs)), total)
        return {}


class LendingExecutor(Executor):
    """A module with a block's first linears: it is given all time steps."""

    def __init__(self, switch: Switch, module: nn.Module, time: Time) -> None:
        super().__init__(switch, module)
        self.time = time

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the first floating tensor."""
        with self.time.lent() as gathered:
            args, kwargs = on_first(gathered, (args, kwargs))
            return self.inner(*args, **kwargs)


class Regathering(Siblings):
    """Linears in a module that was given all time steps: in backward they gather these again."""

    def __init__(self, time: Time, *about: Any, **settings: Any) -> None:
        super().__init__(*about, **settings)
        self.time = time

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        """[rows, all time, features] → [rows, all time, features here]; what the module made of x itself is kept."""
        own = self.time.own(x)
        return super().compute(x) if own is None else self.again(own, x)

    def again(self, own: Tensor, gathered: Tensor | None) -> tuple[Tensor, ...]:
        """[rows, own time, features] → [rows, all time, features here]."""
        weights: list[Any] = [module.weight for module in self.modules]
        about: dict[str, Any] = {"contract": self.contract, "output": self.time.axis, "layout": self.layout}
        about |= {"rows": 1, "total": self.time.steps, "gathered": gathered}
        return product(own, weights, self.biases, **about, **self.tuning.settings)


class Gathering(Regathering):
    """Linears that stand in a block themselves: they gather time for themselves, for backward again unless `kept`."""

    def __init__(self, time: Time, kept: bool, *about: Any, **settings: Any) -> None:
        super().__init__(time, *about, **settings)
        self.kept = kept

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        """[rows, own time, features], or [rows · own time, features] → the same of all time, features here."""
        if self.kept:
            return Siblings.compute(self, self.time.gathered(x))
        if x.dim() == 3:
            return self.again(x, None)
        return tuple(found.flatten(0, 1) for found in self.again(x.unflatten(0, (self.time.rows, -1)), None))


class Scattering(Siblings):
    """A block's last linears: the sum over y of this rank's time; the bias is added to that once."""

    def __init__(self, time: Time, *about: Any, **settings: Any) -> None:
        super().__init__(*about, **settings)
        self.time = time

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        """[rows, all time, features here], or [rows · all time, features here] → the same of own time, features."""
        biases, flat = self.biases, x.dim() == 2
        about: dict[str, Any] = {"contract": self.time.axis, "rows": 1, "total": self.time.steps}
        found = self.product(x.unflatten(0, (self.time.rows, -1)) if flat else x, [None for _ in biases], **about)
        found = [one.flatten(0, 1) for one in found] if flat else found
        return tuple(one if bias is None else one + bias for one, bias in zip(found, biases, strict=True))
