"""The same linears on real gloo ranks, whose collectives are really under way meanwhile: bit for bit as on threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.placement.tensor.product import product
from fourfold.placement.tensor.summa import summa
from ranks import Processes


def layers(world: wire.World, x_size: int, chunks: int) -> list[Tensor]:
    """Outputs and gradients of a product, of its sequence form, and of SUMMA."""
    mesh = wire.Mesh(world, {"x": x_size, "y": world.size // x_size})
    x_axis, y_axis = mesh["x"], mesh["y"]

    def draw(*shape: int) -> Tensor:
        """Equal on every rank: a rank takes parts of 12."""
        return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))

    def mine(tensor: Tensor, *cuts: tuple[int, wire.Axis]) -> Tensor:
        for dim, axis in cuts:
            tensor = tensor.chunk(axis.size, dim)[axis.index]
        return tensor.contiguous().requires_grad_()

    found: list[Tensor] = []

    def note(outs: tuple[Tensor, ...], *leaves: Tensor) -> None:
        torch.cat(outs, -1).square().sum().backward()
        found.extend(out.detach() for out in outs)
        found.extend(leaf.grad for leaf in leaves if leaf.grad is not None)

    weights = [mine(draw(n, 12), (1, x_axis), (0, y_axis)) for n in (24, 12)]
    about: dict[str, Any] = {"contract": x_axis, "output": y_axis, "chunks": chunks}
    x = mine(draw(12, 12), (1, x_axis))
    note(product(x, weights, [None, None], **about), x, *weights)
    x = mine(draw(13, 12)[:12], (1, x_axis), (0, y_axis))
    note(product(x, weights, [None, None], **about, rows=0), x, *weights)
    x = mine(draw(14, 12)[:12], (0, x_axis), (1, y_axis))
    note(summa(x, weights, [None, None], rows=x_axis, features=y_axis), x, *weights)
    return found


@pytest.mark.parametrize(("size", "x_size", "chunks"), [(3, 3, 1), (4, 2, 3)])
def test_processes_and_threads_agree_to_the_bit(gloo: Processes, size: int, x_size: int, chunks: int) -> None:
    real = gloo(size, layers, x_size, chunks)
    threads = wire.threads.launch(size, layers, x_size, chunks)
    for found, wanted in zip(real, threads, strict=True):
        assert len(found) == len(wanted) == 15
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
