"""A whole model out of the parts that the workers of a pipeline hold: for reading, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fourfold.placement.pipe.part import Part
from fourfold.wire import Axis


def spread(
    mine: Mapping[str, Tensor], part: Part, axis: Axis, dtype: torch.dtype, *, trained: bool
) -> dict[str, Tensor]:
    """Logical tensors of all weights, in the model's order, on every rank. All ranks call together.

    Args:
        mine: those of this worker's weights.
        part: which these are.
        axis: the pipe's.
        dtype: of all of them.
        trained: only trained weights have such a tensor.
    """
    whole: dict[str, Tensor] = {}
    device = axis.world.device
    for name, weight in part.weights.items():
        if weight.trained or not trained:
            source = part.holders(name)[0]
            held = (
                mine[name].contiguous()
                if source == axis.index
                else torch.empty(weight.shape, dtype=dtype, device=device)
            )
            axis.broadcast(held, source, "control").wait()
            whole[name] = held
    return whole


def spread_buffers(model: nn.Module, part: Part, axis: Axis) -> None:
    """Every buffer becomes what it is on the worker that runs its module. All ranks call together."""
    for path, module in model.named_modules():
        for buffer in module._buffers.values():
            if buffer is not None and buffer.numel():
                held = buffer.contiguous()
                axis.broadcast(held, part.home(path), "control").wait()
                if held is not buffer:
                    buffer.copy_(held)


@contextmanager
def filled(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The weights of other workers have these values for the length of the context."""
    hollow = {name: weight for name, weight in model.named_parameters() if name in values}
    before = {name: weight.data for name, weight in hollow.items()}
    for name, weight in hollow.items():
        weight.data = values[name].to(weight.dtype)
    try:
        yield
    finally:
        for name, weight in hollow.items():
            weight.data = before[name]
