"""Weight gradients that wait: backward of the input first, the products that make a weight's gradient when asked for.

A linear's or a convolution's backward is two products; only that by the input is on the way to the stage before. The
modules here leave the other one undone, with what it needs, until `Deferral.run`; a weight's gradient then comes to it
as from any backward, hooks included. All other weights (norms, tables, biases) get theirs with the input's, which costs
little: that is the split of zero-bubble schedules (Qi et al. 2023, section 2) for any model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fourfold.placement.uncopied import Uncopied

Undone = tuple[nn.Parameter, Callable[[], Tensor]]
"""A weight, and what makes its gradient."""


@dataclass(frozen=True)
class Product:
    """What a module does with its input and its weight.

    Attributes:
        forward: (input, weight, bias or None) → output.
        by_input, by_weight: (output's gradient, input, weight) → the gradient of one of them.
        bias_dims: (dims of the output) → those that the bias has no dim for.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    by_input: Callable[[Tensor, Tensor, Tensor], Tensor]
    by_weight: Callable[[Tensor, Tensor, Tensor], Tensor]
    bias_dims: Callable[[int], list[int]]


def _leading(dims: int) -> list[int]:
    return list(range(dims - 1))


LINEAR = Product(
    F.linear,
    lambda gradient, x, weight: gradient @ weight,
    lambda gradient, x, weight: gradient.flatten(0, -2).T @ x.flatten(0, -2),
    _leading,
)

TRANSPOSED = Product(
    lambda x, weight, bias: x @ weight if bias is None else x @ weight + bias,
    lambda gradient, x, weight: gradient @ weight.T,
    lambda gradient, x, weight: x.flatten(0, -2).T @ gradient.flatten(0, -2),
    _leading,
)
"""Transformers' `Conv1D`: a linear whose weight lies the other way round."""


def convolution(module: Any) -> Product:
    """Of a `Conv1d`, `Conv2d` or `Conv3d` that pads with zeros."""
    settings = (module.stride, module.padding, module.dilation)

    def backward(gradient: Tensor, x: Tensor, weight: Tensor, place: int) -> Tensor:
        mask = [place == 0, place == 1, False]
        about = (*settings, False, [0] * len(module.stride), module.groups, mask)
        return torch.ops.aten.convolution_backward(gradient, x, weight, None, *about)[place]

    return Product(
        lambda x, weight, bias: torch.convolution(
            x, weight, bias, *settings, False, [0] * len(module.stride), module.groups
        ),
        partial(backward, place=0),
        partial(backward, place=1),
        lambda dims: [dim for dim in range(dims) if dim != 1],
    )


def product_of(module: nn.Module) -> Product | None:
    """What a module is, if its weight's gradient can wait."""
    kind = type(module)
    if kind.forward is nn.Linear.forward:
        return LINEAR
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return TRANSPOSED
    if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and module.padding_mode == "zeros":
        return None if isinstance(module.padding, str) else convolution(module)
    return None


class Deferral(Uncopied):
    """Where what is undone is put down.

    Attributes:
        taken: of the backward that runs; None: nothing is left undone.
    """

    def __init__(self) -> None:
        self.taken: list[Undone] | None = None

    def attach(self, modules: Iterable[nn.Module]) -> None:
        """Take over the forwards of those modules that this knows, and that nobody has taken over."""
        for module in modules:
            product = product_of(module)
            if product is not None and "forward" not in vars(module):
                module.forward = partial(self._forward, module, product, module.forward)

    def _forward(self, module: Any, product: Product, inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        weight = module.weight
        if not (torch.is_grad_enabled() and isinstance(weight, nn.Parameter) and weight.requires_grad):
            return inner(x)
        if x.dim() < 2:  # one row without a dim of its own
            return inner(x)
        return _Deferred.apply(x, weight, module.bias, product, self)  # type: ignore[no-any-return]

    @staticmethod
    def run(undone: Iterable[Undone]) -> None:
        """Make the gradients, and give them to their weights."""
        for weight, gradient in undone:
            torch.autograd.backward(weight, gradient())


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, product: Product, deferral: Deferral
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.deferral, ctx.weight = product, deferral, weight
        return product.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        product, taken = ctx.product, ctx.deferral.taken
        by_input = product.by_input(gradient, x, weight) if ctx.needs_input_grad[0] else None
        by_bias = gradient.sum(product.bias_dims(gradient.dim())) if ctx.needs_input_grad[2] else None
        if taken is None:
            return by_input, product.by_weight(gradient, x, weight), by_bias, None, None
        shape = weight.shape  # its values may leave meanwhile, and are not needed
        taken.append((ctx.weight, lambda: product.by_weight(gradient, x, weight.new_empty(()).expand(shape))))
        return by_input, None, by_bias, None, None
