"""A tensor that lies in files mapped into memory, maybe in several parts: only what is asked for is read.

It stands in for a tensor in the functions by which transformers joins and splits what other layouts pack differently
(experts that are stacked, q|k|v in one or in three), so that a box of the result is read without making the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.placement.piece import boxes


class Brick(NamedTuple):
    """A part of the tensor: where it begins, and a view of a file, whose values are read when they are copied."""

    offsets: tuple[int, ...]
    view: Tensor


class Unread:
    """What is in the files of one tensor.

    Attributes:
        shape: of the tensor.
        bricks: parts that fill it without overlap.
    """

    def __init__(self, shape: Sequence[int], bricks: Sequence[Brick]) -> None:
        """The bricks must fill the shape."""
        self.shape, self.bricks = torch.Size(shape), tuple(bricks)
        held = sum(brick.view.numel() for brick in self.bricks)
        if held != self.shape.numel():
            raise ValueError(f"expected parts that fill a tensor of shape {tuple(self.shape)}, found {held} elements")

    @classmethod
    def of(cls, view: Tensor) -> Unread:
        """A tensor that is one part."""
        return cls(view.shape, [Brick((0,) * view.dim(), view)])

    def box(self, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The box [sizes] of the tensor, as `dtype`."""
        found = self._parts(offsets, sizes)
        if len(found) == 1:
            return found[0].view.to(dtype)
        result = torch.empty(tuple(sizes), dtype=dtype)
        for where, values in found:
            inside = tuple(slice(at, at + size) for at, size in zip(where, values.shape, strict=True))
            result[inside].copy_(values)
        return result

    def run(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Elements [start, stop) of the tensor, row-major, as `dtype`."""
        runs = [self.box(*box, dtype).reshape(-1) for box in boxes(self.shape, start, stop)]
        return runs[0] if len(runs) == 1 else torch.cat([torch.empty(0, dtype=dtype), *runs])

    def _parts(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Brick]:
        """What the bricks have in common with a box, as bricks of the box."""
        parts: list[Brick] = []
        for begin, view in self.bricks:
            common = [
                range(max(at, start), min(at + size, start + extent))
                for at, size, start, extent in zip(offsets, sizes, begin, view.shape, strict=True)
            ]
            if all(common):
                where = tuple(run.start - at for run, at in zip(common, offsets, strict=True))
                for dim, (run, start) in enumerate(zip(common, begin, strict=True)):
                    view = view.narrow(dim, run.start - start, len(run))
                parts.append(Brick(where, view))
        return parts

    # ---- as much of a tensor as is needed to rearrange it

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Rearrange without reading; what is not known here says so, by the error that torch raises."""
        return _REARRANGED[func](*args, **(kwargs or {})) if func in _REARRANGED else NotImplemented

    def size(self, dim: int) -> int:
        """Extent of a dim."""
        return self.shape[dim]

    def contiguous(self) -> Unread:
        """The same: how parts lie in files is nobody's concern."""
        return self


def _cat(tensors: Sequence[Unread], dim: int = 0) -> Unread:
    shape = list(tensors[0].shape)
    starts = list(accumulate((tensor.shape[dim] for tensor in tensors), initial=0))
    shape[dim] = starts[-1]
    shifted = [
        Brick(_with(brick.offsets, dim, brick.offsets[dim] + start), brick.view)
        for tensor, start in zip(tensors, starts, strict=False)
        for brick in tensor.bricks
    ]
    return Unread(shape, shifted)


def _stack(tensors: Sequence[Unread], dim: int = 0) -> Unread:
    def deeper(tensor: Unread) -> Unread:
        shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
        bricks = [Brick((*at[:dim], 0, *at[dim:]), view.unsqueeze(dim)) for at, view in tensor.bricks]
        return Unread(shape, bricks)

    return _cat([deeper(tensor) for tensor in tensors], dim)


def _narrowed(tensor: Unread, dim: int, first: int, size: int) -> Unread:
    offsets = _with((0,) * len(tensor.shape), dim, first)
    sizes = _with(tuple(tensor.shape), dim, size)
    return Unread(sizes, [Brick(where, values) for where, values in tensor._parts(offsets, sizes)])


def _split(tensor: Unread, sizes: int | Sequence[int], dim: int = 0) -> tuple[Unread, ...]:
    extent = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, extent - first) for first in range(0, extent, sizes)]
    starts = accumulate(sizes, initial=0)
    return tuple(_narrowed(tensor, dim, first, size) for first, size in zip(starts, sizes, strict=False))


def _chunk(tensor: Unread, chunks: int, dim: int = 0) -> tuple[Unread, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _transpose(tensor: Unread, dim0: int, dim1: int) -> Unread:
    order = list(range(len(tensor.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    bricks = [Brick(tuple(at[dim] for dim in order), view.permute(order)) for at, view in tensor.bricks]
    return Unread([tensor.shape[dim] for dim in order], bricks)


def _with(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    changed = list(values)
    changed[dim] = value
    return tuple(changed)


_REARRANGED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.transpose: _transpose,
}


class Source(ABC):
    """Weights that lie in files: `parallelize(weights=…)` takes it, and reads no more than it asks for."""

    @abstractmethod
    def unread(self, name: str) -> Unread:
        """The logical tensor as it lies in the files."""

    def __call__(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Flat elements [start, stop) of the logical tensor `name`, as `dtype`, on the host."""
        return self.unread(name).run(start, stop, dtype)

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The box [sizes] of the logical tensor `name`, as `dtype`, on the host."""
        return self.unread(name).box(offsets, sizes, dtype)
