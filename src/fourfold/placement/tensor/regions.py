"""Modules that run on whole features: gathered before, replicated, cut again after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.placement.cut import Share
from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.placement.tensor.logits import SplitLogits
from fourfold.torch_private import map_leaves
from fourfold.wire import Axis, ops


class Sum(NamedTuple):
    """Features [start, stop) of a whole output that ranks of an axis use for split features: gradients are summed."""

    axis: Axis
    columns: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """The same tensor; its gradient is whole as well."""
        if self.columns == ((0, whole.shape[-1]),):
            return ops.identity_sum(whole, self.axis)
        parts, at = [], 0
        for start, stop in self.columns:
            parts += [whole[..., at:start], ops.identity_sum(whole[..., start:stop].contiguous(), self.axis)]
            at = stop
        return torch.cat([*parts, whole[..., at:]], -1)


class Gathered(NamedTuple):
    """Which tensors a module is given with features over `axis`, dealt by `share` (None: they are whole): those in
    these places among the floating ones."""

    axis: Axis
    share: Share | None
    places: frozenset[int]


class WholeExecutor(Executor):
    """A module nobody knows how to split.

    Attributes:
        given: what of its input is gathered.
        output, dealt: over which the features of its outputs are cut again, and how; None: they stay whole.
        sums: by place among its floating outputs, what ranks use for split features where the outputs stay whole.
    """

    def __init__(
        self,
        switch: Switch,
        module: nn.Module,
        given: Gathered,
        output: Axis,
        dealt: Share | None,
        sums: Mapping[int, Sum],
    ) -> None:
        super().__init__(switch, module)
        self.given, self.output, self.dealt, self.sums = given, output, dealt, sums

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Gather every floating tensor that was found to have this rank's features in its last dim."""
        axis, share, known = self.given
        inputs = count()

        def gathered(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if next(inputs) not in known or share is None or not has_features(value, share.extent(axis.index)):
                return value
            return ops.gather_cut(value, axis, sizes=extents(share))

        places = count()

        def cut(value: Any) -> Any:
            dealt = self.dealt
            place = next(places) if isinstance(value, Tensor) and not is_integral(value) else -1
            if place in self.sums:
                return self.sums[place].of(value)
            if dealt is None or not has_features(value, sum(extents(dealt))):
                return value
            return ops.cut_gather(value, self.output, sizes=extents(dealt))

        return map_leaves(cut, self.inner(*map_leaves(gathered, args), **map_leaves(gathered, kwargs)))


def is_integral(value: Tensor) -> bool:
    """Whether it can have no gradient, by its type."""
    return not (value.is_floating_point() or value.is_complex())


def has_features(value: Any, count: int) -> bool:
    """Whether this is a floating tensor with so many features in its last dim."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1:] == (count,)


class LossScope:
    """Around one call of a user's loss: what the model returns in it stays in parts, and the loss sees it whole.

    The mode that does this is entered when the model has returned, so that the model's own forward pays nothing.
    """

    def __init__(self) -> None:
        self._mode: SplitLogits | None = None
        self._stack = ExitStack()
        self._entered = False

    @contextmanager
    def around(self) -> Iterator[None]:
        """For the time of one loss."""
        with ExitStack() as self._stack:
            self._mode, self._entered = SplitLogits(), False
            try:
                yield
            finally:
                self._mode = None

    @property
    def reads(self) -> bool:
        """Code of a loss runs, and none of the model's."""
        return self._mode is not None and not self._mode.quiet

    @contextmanager
    def of_model(self, given: Any) -> Iterator[None]:
        """For the time of the model's own forward, to which the tensors that it is given are what they are."""
        if self.reads and self._mode is not None:
            self._mode.refuse_changed(given)
        with nullcontext() if self._mode is None else self._mode.paused():
            yield

    def whole(self, part: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
        """What the model returns of a tensor whose last dim is cut: marked for a loss, gathered for anybody else."""
        if self._mode is None:
            return ops.gather_cut(part, axis, sizes=sizes)
        if not self._entered:
            self._stack.enter_context(self._mode)
            self._entered = True
        self._mode.mark(part, axis, sizes)
        return part


class RootExecutor(Executor):
    """The whole model: what it returns is whole, for whoever reads it.

    Attributes:
        outputs: by place among the floating tensors that it returns, the axis over which its features lie and how.
        scope: of the loss that calls it.
    """

    def __init__(
        self, switch: Switch, module: nn.Module, outputs: dict[int, tuple[Axis, Share]], scope: LossScope
    ) -> None:
        super().__init__(switch, module)
        self.outputs, self.scope = outputs, scope

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and see to its outputs."""
        with self.scope.of_model((args, kwargs)):
            found = self.inner(*args, **kwargs)
        places = count()

        def whole(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            place = next(places)
            if place not in self.outputs:
                return value
            axis, share = self.outputs[place]
            return self.scope.whole(value, axis, extents(share))

        return map_leaves(whole, found)


class ExitExecutor(RootExecutor):
    """A module that a loss calls itself: what it returns there is whole. Called by the model, it is what it is."""

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and see to its outputs where a loss gets them."""
        return super().on_blocks(*args, **kwargs) if self.scope.reads else self.inner(*args, **kwargs)


def extents(share: Share) -> list[int]:
    """How many indices every rank holds."""
    return [share.extent(index) for index in range(len(share.runs))]


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
