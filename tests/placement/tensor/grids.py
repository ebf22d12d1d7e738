"""A small perceptron of sibling linears, whole and cut over a grid: the oracle of the tests of linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fourfold import wire

Parts = dict[str, Tensor]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def grids(world: int) -> Iterator[dict[str, int]]:
    """Every factorisation of the world into x, y, z and data."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    for x in divisors:
        for y in (n for n in divisors if world % (x * n) == 0):
            for z in (n for n in divisors if world % (x * y * n) == 0):
                yield {"x": x, "y": y, "z": z, "data": world // (x * y * z)}


def whole(rows: Sequence[int] = (13,), width: int = 7, hidden: int = 11) -> Parts:
    """Input and parameters of the perceptron, by name; weights are [N, K]. Odd sizes: axes do not divide them."""
    return {
        "input": draw(*rows, width, seed=1),
        "up": draw(hidden, width, seed=2),
        "up.bias": draw(hidden, seed=3),
        "gate": draw(hidden, width, seed=4),
        "down": draw(width, hidden, seed=5),
        "down.bias": draw(width, seed=6),
    }


LIES = {
    "up": {"y": 0, "x": 1},
    "gate": {"y": 0, "x": 1},
    "up.bias": {"y": 0},
    "down": {"x": 0, "y": 1},
    "down.bias": {"x": 0},
    "output": {"x": -1},
    "input": {"x": -1},
}
"""Along which dim each axis cuts a tensor."""

Linears = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None], bool], Sequence[Tensor]]
"""Sibling linears: (x, weights, biases, transposed) to outputs."""


def run(parts: Parts, linears: Linears) -> Parts:
    """Output, and the gradient of every part, of a loss with a large gradient."""
    own = {name: part.detach().clone().requires_grad_() for name, part in parts.items()}
    up, gate = linears(own["input"], [own["up"], own["gate"]], [own["up.bias"], None], False)
    (output,) = linears(functional.gelu(up) * gate, [own["down"]], [own["down.bias"]], True)
    (output.square().sum() * 1000).backward()
    found: dict[str, Any] = {name: part.grad for name, part in own.items()}
    return {"output": output.detach(), **found}


def dense(parts: Parts) -> Parts:
    """The same in one process."""

    def linears(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], transposed: bool
    ) -> Sequence[Tensor]:
        return [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    return run(parts, linears)


def part(tensor: Tensor, cuts: Mapping[str, int], mesh: wire.Mesh) -> Tensor:
    """This rank's part: the first ranks of an axis have one more."""
    for axis, dim in cuts.items():
        tensor = tensor.tensor_split(mesh[axis].size, dim)[mesh[axis].index]
    return tensor.contiguous()


def close(found: Tensor, wanted: Tensor, scale: Tensor) -> None:
    """Equal up to 1e-12 of the largest element of the whole tensor."""
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-12 * scale.abs().max() if found.numel() else True
