"""3D tensor parallelism: on a cube of q x q x q ranks every matrix lies in q^3 parts, inputs and outputs included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.placement.tensor.product import product
from fourfold.placement.tensor.summa import summa
from fourfold.recipes import _grid
from fourfold.recipes._claim import Claim
from fourfold.training.run import Run
from fourfold.wire import Mesh, World
from fourfold.wire.dry import dry_mesh
from fourfold.wire.threads import launch

M, K, N = 128, 64, 192
"""Rows, input and output features of the product whose bytes are counted on 64 ranks."""

CUBE = {"x": 4, "y": 4, "z": 4}
SQUARE = {"z": 8, "y": 8}

KINDS = ("an input", "a weight", "an output")


def claim() -> Claim:
    """Bian et al. 2021, section 3.

    As the paper's, the product that is counted keeps what it has gathered until backward. A whole model on this plan
    gathers weights again for backward.
    """
    return Claim(
        system="3D tensor parallelism (Colossal-AI)",
        paper="Bian et al. 2021, arXiv 2105.14450",
        statement="gradients of a transformer on 2x2x2 ranks equal one process's; each rank holds 1/8 of every "
        "linear's input, weight and output; a product sends (q-1)/q^3 (MK + KN + MN) elements each way, less than 2D",
        predicted={
            "gradients differ from one process": 0.0,
            "largest part of an input on a rank": 1 / 8,
            "largest part of a weight on a rank": 1 / 8,
            "largest part of an output on a rank": 1 / 8,
            "3D on 64 ranks, elements sent": 2 * 3 / 64 * (M * K + K * N + M * N),
            "2D on 64 ranks, elements sent": 3 * 7 / 64 * (M * K + K * N),
            "3D sends less than 2D": 1.0,
        },
        measure=lambda: _figures("3d"),
        control=lambda: _figures("4d"),
        off="activations lie on q ranks as copies (algorithm 4d); gradients: nothing crosses between ranks",
        tolerance=1e-9,
    )


def _figures(algorithm: str) -> dict[str, float]:
    tensor = {"algorithm": "3d", "q": 2} if algorithm == "3d" else {"algorithm": "4d", "x": 2, "y": 2, "z": 2}
    expected = _grid.serial()
    ranks = launch(8, _step, tensor, expected)
    error = max(rank[0] for rank in ranks) if algorithm == "3d" else _step(_grid.deaf(8), tensor, expected)[0]
    whole = _whole()
    cube = mean(_cube(dry_mesh(CUBE, rank), cut=algorithm == "3d") for rank in range(64))
    square = mean(_square(dry_mesh(SQUARE, rank)) for rank in range(64))
    return {
        "gradients differ from one process": error,
        **{f"largest part of {what} on a rank": _largest(what, [rank[1] for rank in ranks], whole) for what in KINDS},
        "3D on 64 ranks, elements sent": cube,
        "2D on 64 ranks, elements sent": square,
        "3D sends less than 2D": float(cube < square),
    }


# ---- what lies on a rank

Sizes = dict[tuple[str, str], int]
"""(path of a linear in a block, "an input" and the like): elements."""


def _largest(what: str, ranks: Iterable[Sizes], whole: Sizes) -> float:
    return max(sizes[key] / whole[key] for sizes in ranks for key in whole if key[1] == what)


def _step(world: World, tensor: Mapping[str, Any], expected: Mapping[str, Tensor]) -> tuple[float, Sizes]:
    """A step's error, and the elements on this rank."""
    run = _grid.placed(world, {"tensor": tensor})
    sizes = _watched(run.model)
    run.step(_grid.batch())
    return _grid.error(run, expected), sizes | _weights(run)


def _whole() -> Sizes:
    run = _grid.placed(World(0, 1, "alone", torch.device("cpu")), {})
    sizes = _watched(run.model)
    run.step(_grid.batch())
    return sizes | _weights(run)


def _watched(model: nn.Module) -> Sizes:
    """Inputs and outputs of the linears in blocks, as they are called."""
    sizes: Sizes = {}

    def watch(path: str, linear: nn.Module) -> None:
        def hook(_: nn.Module, read: tuple[Tensor, ...], out: Tensor) -> None:
            sizes[path, "an input"], sizes[path, "an output"] = read[0].numel(), out.numel()

        linear.register_forward_hook(hook)

    for path, linear in _linears(model):
        watch(path, linear)
    return sizes


def _weights(run: Run) -> Sizes:
    """What a rank stores of the linears' weights between steps."""
    names = {f"{path}.weight": path for path, _ in _linears(run.model)}
    slots = [slot for unit in run.placed.units for slot in unit.arena.layout.slots]
    return {(names[slot.name], "a weight"): slot.segment for slot in slots if slot.name in names}


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((path, one) for path, one in model.named_modules() if isinstance(one, nn.Linear) and "blocks" in path)


# ---- what a product sends


def _cube(mesh: Mesh, *, cut: bool) -> int:
    """Elements that one rank sends for a product, forward and backward."""
    x, y, z = mesh["x"], mesh["y"], mesh["z"]
    read = torch.ones(M // z.size // (y.size if cut else 1), K // x.size, requires_grad=True)
    weight = torch.empty(N // y.size, K // x.size)
    shard = torch.ones(weight.numel() // z.size)
    z.all_gather(weight, shard, "weight").wait()
    rows: dict[str, Any] = {"rows": 0, "keep": True} if cut else {}
    (out,) = product(read, [weight.requires_grad_()], [None], contract=x, output=y, **rows)
    out.sum().backward()
    assert weight.grad is not None
    z.reduce_scatter(shard, weight.grad, "gradient").wait()
    return mesh.ledger.sent() // shard.element_size()


def _square(mesh: Mesh) -> int:
    """The same by SUMMA."""
    rows, features = mesh["z"], mesh["y"]
    read = torch.ones(M // rows.size, K // features.size, requires_grad=True)
    weight = torch.ones(N // features.size, K // rows.size, requires_grad=True)
    summa(read, [weight], [None], rows=rows, features=features)[0].sum().backward()
    return mesh.ledger.sent() // read.element_size()
