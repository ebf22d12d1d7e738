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
        axis, share: over which its input's features lie, and how.
        output, dealt: over which the features of its outputs lie, and how; None: they stay whole.
    """

    def __init__(
        self, switch: Switch, module: nn.Module, axis: Axis, share: Share, output: Axis | None, dealt: Share | None
    ) -> None:
        super().__init__(switch, module)
        self.axis, self.share, self.output, self.dealt = axis, share, output, dealt

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Gather every floating tensor that has as many features in its last dim as this rank holds."""
        here = self.share.extent(self.axis.index)

        def gathered(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1:] == (here,):
                return ops.gather_cut(value, self.axis, sizes=extents(self.share))
            return value

        found = self.inner(*map_leaves(gathered, args), **map_leaves(gathered, kwargs))
        if self.output is None or self.dealt is None:
            return found
        whole, output, sizes = sum(extents(self.dealt)), self.output, extents(self.dealt)

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1:] == (whole,):
                return ops.cut_gather(value, output, sizes=sizes)
            return value

        return map_leaves(cut, found)


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
