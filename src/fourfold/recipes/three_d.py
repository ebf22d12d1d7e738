"""3D tensor parallelism: on a cube of q x q x q ranks every matrix lies in q^3 parts, inputs and outputs included."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from fourfold.placement.tensor.product import product
from fourfold.placement.tensor.summa import summa
from fourfold.recipes import _grid
from fourfold.recipes._claim import Claim
from fourfold.recipes._grid import Sizes
from fourfold.training.run import Run
from fourfold.wire import Mesh, World
from fourfold.wire.dry import dry_mesh
from fourfold.wire.threads import launch

M, K, N = 128, 64, 192
"""Rows, input and output features of the product whose bytes are counted on 64 ranks."""

CUBE = {"x": 4, "y": 4, "z": 4}
SQUARE = {"z": 8, "y": 8}

LINEARS = ("qkv", "project", "expand", "contract")
KINDS = ("input", "weight", "output")


def claim() -> Claim:
    """Bian et al. 2021, section 3.

    Parts are of what linears read, store and give. What a linear gathers for itself lies on a rank beside that. As the
    paper's, the product that is counted keeps it until backward; a whole model on this plan gathers weights again.
    """
    return Claim(
        system="3D tensor parallelism (Colossal-AI)",
        paper="Bian et al. 2021, arXiv 2105.14450",
        statement="gradients of a transformer on 2x2x2 ranks equal one process's; each rank holds 1/8 of every "
        "linear's input, weight and output; a product sends (q-1)/q^3 (MK + KN + MN) elements each way, less than 2D",
        predicted={
            "gradients differ from one process": 0.0,
            "largest part of any input": 1 / 8,
            "largest part of any weight": 1 / 8,
            "largest part of any output": 1 / 8,
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
    expected = _grid.serial().gradients
    ranks = launch(8, _step, tensor, expected)
    error = max(rank[1] for rank in ranks) if algorithm == "3d" else _step(_grid.deaf(8), tensor, expected)[1]
    whole = _sizes(_grid.placed(_grid.alone(), {}))
    cube = mean(_cube(dry_mesh(CUBE, rank), cut=algorithm == "3d") for rank in range(64))
    square = mean(_square(dry_mesh(SQUARE, rank)) for rank in range(64))
    return {
        "gradients differ from one process": error,
        **{f"largest part of any {what}": _grid.largest(what, [rank[0] for rank in ranks], whole) for what in KINDS},
        "3D on 64 ranks, elements sent": cube,
        "2D on 64 ranks, elements sent": square,
        "3D sends less than 2D": float(cube < square),
    }


def _step(world: World, tensor: Mapping[str, Any], expected: Mapping[str, Tensor]) -> tuple[Sizes, float]:
    """The elements of the linears' tensors on this rank, and a step's error."""
    run = _grid.placed(world, {"tensor": tensor})
    return _sizes(run), _grid.error(run, expected)


def _sizes(run: Run) -> Sizes:
    sizes = _grid.watch(run)
    run.step(_grid.batch())
    return {key: count for key, count in sizes.items() if key[0].removesuffix(".weight").endswith(LINEARS)}


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
