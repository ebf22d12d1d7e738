"""Modules that compute across features which lie over three ranks, unevenly: each function is exact, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold import wire
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.executor import Switch
from fourfold.placement.tensor.norms import NormExecutor
from fourfold.wire.threads import launch

from .grids import close, draw

SIZES = (4, 2, 6)
"""Features of three ranks."""

WIDTH = sum(SIZES)
SPANS = (slice(0, 4), slice(4, 6), slice(6, 12))


class Own(nn.Module):
    """A norm with a function of an author's."""

    def __init__(self, function: Callable[[Tensor], Any], features: slice = slice(None)) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(draw(WIDTH, seed=5)[features])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * self.weight


def _merged(pair: Sequence[Tensor], x: Tensor) -> Tensor:
    spread, mean = pair
    return (x - mean) / (spread + 1e-3)


def _square_sum_by_shape(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-5)


def _by_groups(x: Tensor) -> Tensor:
    groups = x.view(*x.shape[:2], -1, 2)
    return (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-5)).flatten(-2)


def _by_groups_of_whole_count(x: Tensor) -> Tensor:
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return (groups / (groups.norm(dim=-1, keepdim=True) + 1)).reshape(x.shape)


EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": lambda x: F.normalize(x, dim=-1) * WIDTH**0.5,
    "normalize of rows flattened": lambda x: F.normalize(x.reshape(-1, x.shape[-1])).view(x.shape),
    "var_mean": lambda x: _merged(torch.var_mean(x, -1, unbiased=False, keepdim=True), x),
    "std_mean": lambda x: _merged(torch.std_mean(x, dim=-1, keepdim=True), x),
    "std": lambda x: x / (x.std(-1, keepdim=True) + 1e-3),
    "norm": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1),
    "norm of order 3": lambda x: x / (x.norm(3, -1)[..., None] + 1),
    "vector_norm": lambda x: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1),
    "greatest norm": lambda x: x / (torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True) + 1),
    "shape as a number": _square_sum_by_shape,
    "size as a number": lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-5) * x.size(-1) ** 0.5,
    "einsum": lambda x: x * torch.rsqrt(torch.einsum("btd,btd->bt", x, x)[..., None] / x.shape[-1] + 1e-5),
    "einsum, ellipsis": lambda x: x * torch.rsqrt(torch.einsum("...d,...d->...", x, x)[..., None] + 1e-5),
    "matmul": lambda x: x * torch.rsqrt((x[..., None, :] @ x[..., :, None])[..., 0] / WIDTH + 1e-5),
    "max, first": lambda x: x / (x.abs().max(-1, keepdim=True)[0] + 1),
    "max, values": lambda x: x / (x.abs().max(dim=-1, keepdim=True).values + 1),
    "amax": lambda x: x / (x.abs().amax(-1, keepdim=True) + 1),
    "softmax": lambda x: torch.softmax(x, -1),
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "topk": lambda x: x / (x.topk(5, -1)[0].sum(-1, keepdim=True).abs() + 1),
    "sort": lambda x: x.sort(-1).values,
    "cumsum": lambda x: x - x.cumsum(-1) / 7,
    "groups": _by_groups,
    "groups by count": _by_groups_of_whole_count,
    "transposed": lambda x: (x.transpose(1, 2) * 2).transpose(1, 2) + x.sum(1, keepdim=True),
    "a number's type": lambda x: x * torch.full((), 0.5).type_as(x) + torch.zeros_like(x),
}

REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "flip": (lambda x: x.flip(-1), "calls flip"),
    "roll": (lambda x: x.roll(1, -1), "calls roll"),
    "chunk": (lambda x: torch.cat(x.chunk(2, -1), -1), "calls chunk"),
    "a part": (lambda x: x - x[..., :1], "calls __getitem__"),
    "prod": (lambda x: x - x.prod(-1, keepdim=True), "calls prod"),
    "linear": (lambda x: F.linear(x, torch.eye(WIDTH, dtype=x.dtype)), "calls linear"),
    "pooling": (lambda x: x - F.adaptive_avg_pool1d(x, 1), "calls adaptive_avg_pool1d"),
    "two dims": (lambda x: x - x.mean((1, 2), keepdim=True), r"takes a mean over dims \(1, 2\)"),
    "all": (lambda x: x - x.mean(), "takes a mean over dims None"),
    "order": (lambda x: x * torch.arange(x.shape[-1]), "joins \\[12\\]"),
    "rows of another size": (lambda x: x.reshape(-1, 3), "calls reshape"),
    "groups of all tokens": (lambda x: x.view(-1, 3).mean(-1), "calls view"),
    "max over tokens": (lambda x: x - x.max(1, keepdim=True)[0], "calls max"),
}


def on_ranks(body: Callable[[wire.Axis], Any]) -> list[Any]:
    """`body(axis)` on every one of three ranks."""
    return launch(len(SIZES), lambda world: body(wire.Mesh(world, {"x": len(SIZES)})["x"]))


def ran(norm: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """What a norm gives; gradients of what it is given and of its weight."""
    x = x.clone().requires_grad_()
    y = norm(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *norm.parameters()], upstream.expand_as(y))]


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    x, upstream = draw(2, 3, WIDTH, seed=1), draw(2, 3, WIDTH, seed=2)
    wanted = ran(Own(EXACT[name]), x, upstream)

    def body(axis: wire.Axis) -> list[Tensor]:
        here = SPANS[axis.index]
        module = Own(EXACT[name], here)
        NormExecutor(Switch(), module, "norm", axis, SIZES)
        return ran(module, x[..., here].contiguous(), upstream[..., here])

    found = on_ranks(body)
    assert [len(one) for one in found] == [3] * len(SIZES)
    for tensor, *parts in zip(wanted, *found, strict=True):
        close(torch.cat(parts, -1), tensor, tensor)


def test_norm_of_zeros_has_a_gradient() -> None:
    """As in one process, where a square root of a sum has none."""

    def body(axis: wire.Axis) -> list[Tensor]:
        module = Own(EXACT["norm"], SPANS[axis.index])
        NormExecutor(Switch(), module, "norm", axis, SIZES)
        return ran(module, torch.zeros(1, 2, SIZES[axis.index], dtype=torch.float64), torch.ones(()))

    wanted = ran(Own(EXACT["norm"]), torch.zeros(1, 2, WIDTH, dtype=torch.float64), torch.ones(()))
    for tensor, *parts in zip(wanted, *on_ranks(body), strict=True):
        assert torch.equal(torch.cat(parts, -1), tensor)


def _refusal(function: Callable[[Tensor], Any], axis: wire.Axis, *, ordered: bool = True, device: str = "cpu") -> str:
    module = Own(function, SPANS[axis.index]).to(device)
    NormExecutor(Switch(), module, "norm", axis, SIZES, ordered)
    with pytest.raises(PlacementError) as caught:
        module(draw(2, 3, SIZES[axis.index], seed=1).to(device))
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    """On tensors without values, as in a rehearsal: so for models of any size."""
    function, words = REFUSED[name]
    for message in on_ranks(lambda axis: _refusal(function, axis, device="meta")):
        assert message.startswith("norm: ")
        assert re.search(words, message), message


@pytest.mark.parametrize("name", ["cumsum", "topk", "groups"])
def test_features_dealt_in_several_runs_have_no_order(name: str) -> None:
    for message in on_ranks(lambda axis: _refusal(EXACT[name], axis, ordered=False)):
        assert "norm: calls" in message


def test_code_that_torch_does_not_show_is_refused() -> None:
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x / x.detach().clone().numpy().max()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    for message in on_ranks(lambda axis: _refusal(Hidden.apply, axis)):
        assert message.startswith("norm: ")
