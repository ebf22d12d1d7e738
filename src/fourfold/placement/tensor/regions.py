"""Modules that run on whole features: gathered before, replicated, cut again after."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fourfold.placement.cut import Share
from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.torch_private import leaves, map_leaves
from fourfold.wire import Axis, ops


class WholeExecutor(Executor):
    """A module nobody knows how to split.

    Attributes:
        axis, share: over which its input's features lie, and how; None: they are whole.
        output, dealt: over which the features of its outputs are cut again, and how; None: they stay whole.
    """

    def __init__(
        self, switch: Switch, module: nn.Module, axis: Axis, share: Share | None, output: Axis, dealt: Share | None
    ) -> None:
        super().__init__(switch, module)
        self.axis, self.share, self.output, self.dealt = axis, share, output, dealt

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Gather every floating tensor that has as many features in its last dim as this rank holds."""

        def gathered(value: Any) -> Any:
            share = self.share
            if share is None or not _has_features(value, share.extent(self.axis.index)):
                return value
            return ops.gather_cut(value, self.axis, sizes=extents(share))

        def cut(value: Any) -> Any:
            dealt = self.dealt
            if dealt is None or not _has_features(value, sum(extents(dealt))):
                return value
            return ops.cut_gather(value, self.output, sizes=extents(dealt))

        return map_leaves(cut, self.inner(*map_leaves(gathered, args), **map_leaves(gathered, kwargs)))


def _has_features(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1:] == (count,)


class RootExecutor(Executor):
    """The whole model: what it returns is whole, for whoever reads it.

    Attributes:
        outputs: by place among the floating tensors that it returns, the axis over which its features lie and how.
    """

    def __init__(self, switch: Switch, module: nn.Module, outputs: dict[int, tuple[Axis, Share]]) -> None:
        super().__init__(switch, module)
        self.outputs = outputs

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and gather its outputs."""
        found = self.inner(*args, **kwargs)
        places = iter(range(sum(1 for _ in leaves(found))))

        def whole(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            place = next(places)
            if place not in self.outputs:
                return value
            axis, share = self.outputs[place]
            return ops.gather_cut(value, axis, sizes=extents(share))

        return map_leaves(whole, found)


def extents(share: Share) -> list[int]:
    """How many indices every rank holds."""
    return [share.extent(index) for index in range(len(share.runs))]
