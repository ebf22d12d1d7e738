"""What crosses a cut: values, and the shapes of what does not cross."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)
"""Element types by their number in a description."""


class Look(NamedTuple):
    """How a tensor looks from outside: its element type, whether gradients come back for it, and its shape."""

    dtype: torch.dtype
    grad: bool
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Look:
        """Of a tensor at hand."""
        return cls(tensor.dtype, tensor.requires_grad, tuple(tensor.shape))


Looks = tuple[tuple[Look, ...], ...]
"""Of what every layer before a cut returned, layer by layer."""


class Bundle(NamedTuple):
    """What a stage gives the next one.

    Attributes:
        values: the tensors that cross, in the order of `Layers.crossing`.
        looks: of the results of all layers before the cut: the model's own code, which runs again behind it, asks
            stand-ins for their shapes.
        extents: by what a tensor grid deals the micro-batch (`tensor.between`).
    """

    values: tuple[Tensor, ...]
    looks: Looks
    extents: tuple[int, ...] = ()

    def detached(self) -> Bundle:
        """The same values as beginnings of a graph of their own."""
        return self._replace(values=tuple(value.detach().requires_grad_(value.requires_grad) for value in self.values))

    def ends(self, by: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """Where backward begins, and with which of these gradients of the values."""
        pairs = zip(self.values, by, strict=True)
        wanted = [(value, gradient) for value, gradient in pairs if gradient is not None and value.requires_grad]
        return [value for value, _ in wanted], [gradient for _, gradient in wanted]

    def described(self) -> Tensor:
        """All but the values as whole numbers, int64, so that it can cross."""
        numbers = [len(self.extents), *self.extents, len(self.looks)]
        for layer in self.looks:
            numbers.append(len(layer))
            for look in layer:
                numbers += (DTYPES.index(look.dtype), look.grad, len(look.shape), *look.shape)
        return torch.tensor(numbers, dtype=torch.int64)

    @property
    def words(self) -> int:
        """How many numbers `described` makes."""
        return 2 + len(self.extents) + sum(1 + sum(3 + len(look.shape) for look in layer) for layer in self.looks)

    @classmethod
    def of(cls, description: Tensor, values: Sequence[Tensor], crossing: Sequence[tuple[int, int]]) -> Bundle:
        """What has come: which values, by (layer, leaf), stands in `crossing`."""
        numbers = iter(description.tolist())
        extents = tuple(next(numbers) for _ in range(next(numbers)))
        looks = tuple(_read(numbers))
        pairs = zip(values, crossing, strict=True)
        taken = (value.requires_grad_(looks[layer][leaf].grad) for value, (layer, leaf) in pairs)
        return cls(tuple(taken), looks, extents)


class _Given(torch.autograd.Function):
    """What came, as if made here: backward has left what reads it when its gradient is there, and it may be changed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def given(value: Tensor) -> Tensor:
    """A value as a stage's layers get it."""
    return _Given.apply(value) if value.requires_grad else value  # type: ignore[no-any-return]


def _read(numbers: Iterator[int]) -> Iterator[tuple[Look, ...]]:
    for _ in range(next(numbers)):
        yield tuple(
            Look(DTYPES[next(numbers)], bool(next(numbers)), tuple(next(numbers) for _ in range(next(numbers))))
            for _ in range(next(numbers))
        )


def gradients(values: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Those of a bundle's values, taken off; None for those that want none, or got none."""
    found = tuple(value.grad for value in values)
    for value in values:
        value.grad = None
    return found
