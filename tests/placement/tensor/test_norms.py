"""Norms of features that lie over an axis: one message each way, and as many right digits as one process has."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold import wire
from fourfold.ledger import Ledger
from fourfold.placement.tensor.executor import Switch
from fourfold.placement.tensor.norms import NormExecutor, moments
from fourfold.wire import formulas
from fourfold.wire.threads import launch

from .grids import close, draw

TOKENS = 6
SIZES = (4, 3, 5)
"""Features of three ranks."""


class Own(nn.Module):
    """A layer norm as authors write it, and the variance unbiased."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
        return self.weight * (x - mean) / torch.sqrt(variance + 1e-5) + self.bias


MODULES: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "layer, no weights": lambda size: nn.LayerNorm(size, elementwise_affine=False),
    "rms": lambda size: nn.RMSNorm(size, eps=1e-6),
    "own": Own,
}


def module_of(name: str, size: int, features: slice) -> nn.Module:
    """With the weights of some of the features."""
    module = MODULES[name](size).double()
    for seed, name in enumerate([name for name, _ in module.named_parameters()]):
        setattr(module, name, nn.Parameter(draw(size, seed=10 + seed)[features]))
    return module


def ran(norm: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = norm(x)
    y.backward(upstream)
    return {"y": y.detach(), "x": _grad(x), **{name: _grad(weight) for name, weight in norm.named_parameters()}}


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def on_ranks(body: Callable[[wire.Axis, slice], Any]) -> list[Any]:
    """`body(axis, features)` on every one of three ranks."""
    edges = [sum(SIZES[:rank]) for rank in range(len(SIZES) + 1)]
    spans = [slice(start, stop) for start, stop in pairwise(edges)]

    def rank(world: wire.World) -> Any:
        axis = wire.Mesh(world, {"x": len(SIZES)})["x"]
        return body(axis, spans[axis.index])

    return launch(len(SIZES), rank)


def split(name: str, x: Tensor, upstream: Tensor) -> list[tuple[dict[str, Tensor], Ledger]]:
    def body(axis: wire.Axis, here: slice) -> tuple[dict[str, Tensor], Ledger]:
        module = module_of(name, sum(SIZES), here)
        NormExecutor(Switch(), module, "norm", axis, SIZES)
        return ran(module, x[..., here], upstream[..., here]), axis.ledger

    return on_ranks(body)


def joined(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([one[name] for one in found], -1) for name in found[0]}


@pytest.mark.parametrize("name", MODULES)
def test_uneven_features_equal_one_process(name: str) -> None:
    x, upstream = draw(2, TOKENS // 2, sum(SIZES), seed=1), draw(2, TOKENS // 2, sum(SIZES), seed=2)
    wanted = ran(module_of(name, sum(SIZES), slice(None)), x, upstream)
    found = joined([one for one, _ in split(name, x, upstream)])
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        close(found[key], tensor, tensor)


@pytest.mark.parametrize("name", MODULES)
def test_one_message_each_way(name: str) -> None:
    """Of (mean, squared deviations) a gather, of one number a sum; backward the row sums together."""
    x = draw(TOKENS, sum(SIZES), seed=1)
    size, one = len(SIZES), 8 * TOKENS
    for index, (_, ledger) in enumerate(split(name, x, x)):
        gather = formulas.all_gather(size, size * 2 * one)
        single, double = (formulas.all_reduce(size, nbytes, 8, index) for nbytes in (one, 2 * one))
        layer = {("activation", "all_gather"): (gather, 1), ("activation-gradient", "all_reduce"): (double, 1)}
        rms = {("activation", "all_reduce"): (single, 1), ("activation-gradient", "all_reduce"): (single, 1)}
        own = {  # asks for a mean, and then for a variance
            **layer,
            ("activation", "all_reduce"): (single, 1),
            ("activation-gradient", "all_reduce"): (single + double, 2),
        }
        wanted = {"rms": rms, "own": own}.get(name, layer)
        found = {(flow.kind, flow.op): (traffic.bytes, traffic.calls) for flow, traffic in ledger.traffic().items()}
        assert found == wanted


def test_features_far_from_zero_keep_their_digits() -> None:
    """Mean 1e6, spread 1. Taking 1e6 away again is exact, so the small numbers' norm is the true one.

    One process finds it to some units of the last place of 1e6 (1e-10); of a sum of squares of 1e12 less another,
    1e-4 at best would be left.
    """
    far = draw(64, sum(SIZES), seed=1) + 1e6
    upstream = draw(64, sum(SIZES), seed=2)
    true = ran(module_of("layer", sum(SIZES), slice(None)), far - 1e6, upstream)
    one = ran(module_of("layer", sum(SIZES), slice(None)), far, upstream)
    found = joined([one for one, _ in split("layer", far, upstream)])
    unit = torch.finfo(torch.float64).eps * 1e6
    for key, tensor in true.items():
        scale = tensor.abs().max()
        here, there = ((other[key] - tensor).abs().max() / scale for other in (found, one))
        assert here <= 8 * unit, key
        assert here <= 4 * max(there, unit), key


def test_means_apart_from_rank_to_rank() -> None:
    """Each rank's own deviations are tiny beside those between ranks: merging is where they come from."""
    x = draw(TOKENS, sum(SIZES), seed=1) * 1e-3 + torch.tensor([-1e3] * 4 + [0.0] * 3 + [2e3] * 5, dtype=torch.float64)
    wanted = x - x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    for index, (deviations, variance) in enumerate(on_ranks(lambda axis, here: moments(x[..., here], axis, SIZES))):
        here = slice(sum(SIZES[:index]), sum(SIZES[: index + 1]))
        close(deviations, wanted[0][..., here], wanted[0])
        close(variance, wanted[1], wanted[1])


def test_all_ranks_merge_to_the_same_bits() -> None:
    x = draw(TOKENS, sum(SIZES), seed=1) + 3
    first, *others = (found[1] for found in on_ranks(lambda axis, here: moments(x[..., here], axis, SIZES)))
    assert all(torch.equal(first, other) for other in others)


def test_gradients_of_gradients() -> None:
    """A penalty on the gradient of a norm's input, as one process has it."""
    x, upstream = draw(TOKENS, sum(SIZES), seed=1), draw(TOKENS, sum(SIZES), seed=2)

    def penalised(norm: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (once,) = torch.autograd.grad(norm(x), x, upstream, create_graph=True)
        once.pow(3).sum().backward()
        return _grad(x)

    def body(axis: wire.Axis, here: slice) -> Tensor:
        module = nn.LayerNorm(sum(SIZES), elementwise_affine=False)
        NormExecutor(Switch(), module, "norm", axis, SIZES)
        return penalised(module, x[..., here], upstream[..., here])

    wanted = penalised(lambda x: F.layer_norm(x, (sum(SIZES),)), x, upstream)
    close(torch.cat(on_ranks(body), -1), wanted, wanted)
