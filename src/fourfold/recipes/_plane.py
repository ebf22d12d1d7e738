"""A transformer block out of SUMMA's linears on q x q x d ranks, beside the same block in one process.

Rows of the batch lie over data and z, features of everything over y; a weight's output features lie over y, its input
features over z. Vectors (biases, norms) lie over y and z, and are gathered over z to be used, as an arena does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.placement.tensor.summa import summa
from fourfold.wire import Mesh, ops

ROWS, LENGTH, HIDDEN, HEAD = 36, 4, 36, 6
"""Sizes that 2 x 2, 2 x 2 x 2, 3 x 3 and 3 x 3 x 2 ranks divide."""

TOKENS = ROWS * LENGTH
ITEM = 8
"""Bytes of an element."""

GROUPS = {
    "qkv": (HIDDEN, 3 * HIDDEN),
    "project": (HIDDEN, HIDDEN),
    "expand": (HIDDEN, 4 * HIDDEN),
    "contract": (4 * HIDDEN, HIDDEN),
}
"""Input and output features of the linears; q, k and v read the same and are multiplied together."""

Parts = Mapping[str, Tensor]
Linears = Callable[[Tensor, Sequence[str]], Sequence[Tensor]]
Norm = Callable[[Tensor, str], Tensor]


class Outcome(NamedTuple):
    """One rank's forward and backward.

    Attributes:
        output, gradients: how far they are from those of one process.
        activation, weight: largest part of one on a rank.
        sent: elements that its linears sent.
        deep: elements that the sum over the layers sent.
    """

    output: float
    gradients: float
    activation: float
    weight: float
    sent: int
    deep: int


def largest(ranks: Sequence[Outcome]) -> Outcome:
    """The largest figures of any rank."""
    return Outcome(*map(max, *ranks))


def outcome(mesh: Mesh, *, deep: bool = True) -> Outcome:
    """A forward and backward on a mesh of z, y and data; `deep`: gradients are summed over data."""
    whole = _parts()
    seen, expected = _run(whole, _dense)
    own = {name: _part(tensor, _lies(name, tensor), mesh) for name, tensor in whole.items()}
    here, found = _run(own, lambda parts: _cut(parts, mesh))
    sent = sum(one.bytes for flow, one in mesh.ledger.traffic().items() if flow.op in ("broadcast", "reduce"))
    before = mesh.ledger.sent()
    if deep:
        for name in sorted(found.keys() - {"x", "output"}):
            mesh["data"].all_reduce(found[name], "gradient").wait()
    cut = {name: _part(tensor, _lies(name, tensor), mesh) for name, tensor in expected.items()}
    return Outcome(
        output=_error([found.pop("output")], [cut.pop("output")]),
        gradients=_error([found[name] for name in cut], list(cut.values())),
        activation=max(here[name] / seen[name] for name in seen),
        weight=max(own[name].numel() / whole[name].numel() for name in whole if name != "x"),
        sent=sent // ITEM,
        deep=(mesh.ledger.sent() - before) // ITEM,
    )


def _error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """max|a - b| / max|b| over all of them: the gradient of a key's bias is zero."""
    apart = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
    return apart / max(float(other.abs().max()) for other in expected)


def _parts() -> dict[str, Tensor]:
    """The block's input and weights; matrices are [outputs, inputs]."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    parts = {"x": draw(ROWS, LENGTH, HIDDEN)}
    shapes = {**dict.fromkeys(("q", "k", "v"), (HIDDEN, HIDDEN)), **GROUPS}
    for name, (inputs, outputs) in shapes.items():
        if name != "qkv":
            parts |= {name: draw(outputs, inputs) / inputs**0.5, f"{name}.bias": draw(outputs)}
    for name in ("norm1", "norm2"):
        parts |= {name: 1 + draw(HIDDEN) / 4, f"{name}.bias": draw(HIDDEN)}
    return parts


def _lies(name: str, tensor: Tensor) -> list[tuple[str, int]]:
    """Which axes cut a tensor, one after the other, and along which of its dims."""
    if name in ("x", "output"):
        return [("data", 0), ("z", 0), ("y", -1)]
    return [("y", 0), ("z", tensor.dim() - 1)]


def _part(tensor: Tensor, lies: Sequence[tuple[str, int]], mesh: Mesh) -> Tensor:
    for axis, dim in lies:
        tensor = tensor.chunk(mesh[axis].size, dim)[mesh[axis].index]
    return tensor.contiguous()


# ---- the block


def _run(parts: Parts, way: Callable[[Parts], tuple[Linears, Norm]]) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Elements of every activation; and the output, with the gradients of all parts."""
    own = {name: part.clone().requires_grad_() for name, part in parts.items()}
    activations = _block(own["x"], *way(own))
    output = activations["output"]
    output.square().sum().backward()
    gradients = {name: part.grad for name, part in own.items() if part.grad is not None}
    return {name: one.numel() for name, one in activations.items()}, {"output": output.detach(), **gradients}


def _block(x: Tensor, linears: Linears, norm: Norm) -> dict[str, Tensor]:
    """All activations of a block: [rows, time, features here]."""
    found = {"x": x, "norm1": norm(x, "norm1")}
    found |= zip("qkv", linears(found["norm1"], ("q", "k", "v")), strict=True)
    q, k, v = (found[name].view(*x.shape[:2], -1, HEAD).transpose(1, 2) for name in "qkv")
    found["mixed"] = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
    (found["project"],) = linears(found["mixed"], ("project",))
    found["middle"] = x + found["project"]
    found["norm2"] = norm(found["middle"], "norm2")
    (found["expand"],) = linears(found["norm2"], ("expand",))
    found["gelu"] = F.gelu(found["expand"])
    (found["contract"],) = linears(found["gelu"], ("contract",))
    found["output"] = found["middle"] + found["contract"]
    return found


def _dense(parts: Parts) -> tuple[Linears, Norm]:
    """In one process."""

    def linears(x: Tensor, names: Sequence[str]) -> Sequence[Tensor]:
        return [F.linear(x, parts[name], parts[f"{name}.bias"]) for name in names]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), parts[name], parts[f"{name}.bias"])

    return linears, norm


def _cut(parts: Parts, mesh: Mesh) -> tuple[Linears, Norm]:
    """On a rank of the mesh."""
    z, y = mesh["z"], mesh["y"]

    def vector(name: str) -> Tensor:
        return ops.gather_scatter(parts[name], z, "weight", dim=0)

    def linears(x: Tensor, names: Sequence[str]) -> Sequence[Tensor]:
        found = summa(x, [parts[name] for name in names], [None for _ in names], rows=z, features=y)
        return [one + vector(f"{name}.bias") for name, one in zip(names, found, strict=True)]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - ops.sum_sum(x.sum(-1, keepdim=True), y) / HIDDEN
        variance = ops.sum_sum(centred.square().sum(-1, keepdim=True), y) / HIDDEN
        return centred * torch.rsqrt(variance + 1e-5) * vector(name) + vector(f"{name}.bias")

    return linears, norm
