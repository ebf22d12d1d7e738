"""Tensors without features that join split ones, dealt like these: slopes of heads, masks by head, tables of positions.

A module's buffers, and what it is given, are whole on every rank. Where the module joins a dim of one with the features
or heads that are here, it gets the part of these: each rank, for the time of the module's forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.placement.tensor.regions import is_integral
from fourfold.torch_private import map_leaves


class Part(NamedTuple):
    """Which entries of a dim are here.

    Attributes:
        dim: counted from the last (-1).
        size: entries of the whole, which may follow one another several times (rows × heads).
        here: those of this rank, in order.
    """

    dim: int
    size: int
    here: tuple[range, ...]

    def of(self, whole: Tensor) -> Tensor:
        """This rank's; the same tensor if a module around this one was given its part already."""
        dim = whole.dim() + self.dim
        if whole.shape[dim] % self.size:
            return whole
        repeats = torch.arange(0, whole.shape[dim], self.size, device=whole.device)
        here = torch.cat([torch.arange(run.start, run.stop, device=whole.device) for run in self.here])
        return whole.index_select(dim, (repeats[:, None] + here).flatten())


class BesideExecutor(Executor):
    """A module that joins what it has whole with what is split.

    Attributes:
        given: by place among the floating tensors that it is given, which part of them it gets.
        buffers: (module, name) of those that it reads, with the parts.
    """

    def __init__(
        self,
        switch: Switch,
        module: nn.Module,
        given: Mapping[int, Part],
        buffers: Sequence[tuple[nn.Module, str, Part]],
    ) -> None:
        super().__init__(switch, module)
        self.given, self.buffers = given, buffers

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Call it with the parts that are here."""
        places = count()

        def part(value: Any) -> Any:
            if not isinstance(value, Tensor) or is_integral(value):
                return value
            place = next(places)
            return self.given[place].of(value) if place in self.given else value

        given = map_leaves(part, (args, kwargs)) if self.given else (args, kwargs)
        with self._dealt():
            return self.inner(*given[0], **given[1])

    @contextmanager
    def _dealt(self) -> Iterator[None]:
        """Buffers hold the parts that are here."""
        whole = [(module, name, module.get_buffer(name)) for module, name, _ in self.buffers]
        try:
            for module, name, part in self.buffers:
                setattr(module, name, part.of(module.get_buffer(name)))
            yield
        finally:
            for module, name, buffer in whole:
                setattr(module, name, buffer)
