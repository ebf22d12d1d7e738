"""Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): between linears, time lies over y.

On the 1D algorithm the residual is whole on every rank of y: norms, dropouts and sums are computed y times. Here each
rank has a part of the time steps from the first block's beginning to the last one's end. The module that holds an
attention's or an MLP's first linears gets all of them, gathered; its last linear sums and deals them out again: a
gather and a scatter where there was a sum, so as many bytes, and activations between take a y-th of the memory.

What the gather brings is kept for the weights' gradients.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fourfold.placement.cut import deal
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.torch_private import map_leaves
from fourfold.wire import Axis, ops
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

    def begin(self, x: Tensor) -> Tensor:
        """This rank's time steps of what the first block is given.

        Raises:
            PlacementError: it is no tensor of [rows, steps, features].
        """
        if x.dim() != 3:
            raise PlacementError(
                f"plan.placement.tensor: 1d-sequence cuts time: expected blocks that are given [rows, time, features], "
                f"found {list(x.shape)}; choose algorithm: 1d"
            )
        self.rows, self.steps = x.shape[:2]
        return ops.cut_gather(x, self.axis, dim=1, sizes=self.sizes(x))

    def end(self, x: Tensor) -> Tensor:
        """All time steps of what the last block gives."""
        return ops.gather_cut(x, self.axis, dim=self.dim(x), sizes=self.sizes(x))

    def gathered(self, x: Tensor) -> Tensor:
        """All time steps; in backward their gradients are summed and dealt out again."""
        return ops.gather_scatter(x, self.axis, dim=self.dim(x), sizes=self.sizes(x))

    def scattered(self, x: Tensor) -> Tensor:
        """The sum over the axis of this rank's time steps; in backward their gradients are gathered."""
        return ops.scatter_gather(x, self.axis, dim=self.dim(x), sizes=self.sizes(x))

    def dim(self, x: Tensor) -> int:
        """Of time: tokens may be flattened, a rank's own one after the other."""
        return 1 if x.dim() == 3 else 0

    def sizes(self, x: Tensor) -> list[int]:
        """Every rank's extent along that dim."""
        each = 1 if x.dim() == 3 else self.rows
        return [each * steps for steps in shares(self.steps, self.axis.size)]

    def runs(self) -> list[range]:
        """Every rank's time steps."""
        return [deal(self.steps, self.axis.size, index) for index in range(self.axis.size)]


class EdgeExecutor(Executor):
    """The first block, or the last one, or one that is both: between them time lies over the axis."""

    def __init__(self, switch: Switch, module: nn.Module, time: Time, *, first: bool, last: bool) -> None:
        super().__init__(switch, module)
        self.time, self.first, self.last = time, first, last

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Cut the first floating tensor that the block is given; gather the first one that it gives."""
        if self.first:
            args, kwargs = on_first(self.time.begin, (args, kwargs))
        found = self.inner(*args, **kwargs)
        return on_first(self.time.end, found) if self.last else found


class GatheringExecutor(Executor):
    """A module that computes on all time steps: it is given those of this rank."""

    def __init__(self, switch: Switch, module: nn.Module, time: Time) -> None:
        super().__init__(switch, module)
        self.time = time

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the first floating tensor."""
        args, kwargs = on_first(self.time.gathered, (args, kwargs))
        return self.inner(*args, **kwargs)


def on_first(change: Any, value: Any) -> Any:
    """The same nest with the first floating tensor of at least two dims changed."""
    changed = False

    def visit(leaf: Any) -> Any:
        nonlocal changed
        if changed or not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() < 2:
            return leaf
        changed = True
        return change(leaf)

    return map_leaves(visit, value)
