"""Sequence forms: rows cut over the axis on which a product else keeps copies; and products in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.placement.tensor.product import product

from .grids import LIES, Linears, Parts, close, dense, draw, grids, part, run, whole


def on_mesh(mesh: wire.Mesh, rows: int, total: int, **options: Any) -> Linears:
    """As Megatron's sequence parallelism where x = 1, as the 3D algorithm where both are larger."""

    def linears(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], transposed: bool
    ) -> Sequence[Tensor]:
        contract, output = (mesh["y"], mesh["x"]) if transposed else (mesh["x"], mesh["y"])
        across: dict[str, Any] = {"contract": contract, "output": output}
        return product(x, weights, biases, rows=rows, total=total, **across, **options)

    return linears


def cut(parts: Parts, mesh: wire.Mesh, rows: int = 0) -> Parts:
    """Rows of the batch lie over z and data, and within each over y."""
    lies: dict[str, Mapping[str, int]] = dict(LIES)
    for name in ("input", "output"):
        batch = {axis: 0 for axis in ("z", "data") if mesh[axis].size > 1}
        lies[name] = {**batch, "y": rows, "x": -1}
    return {name: part(tensor, lies[name], mesh) for name, tensor in parts.items()}


def results(mesh: wire.Mesh, parts: Parts, rows: int = 0, **options: Any) -> Parts:
    """One rank's results; gradients of weights are summed over the ranks with other rows."""
    mine = part(parts["input"], {"z": 0, "data": 0}, mesh)
    found = run(cut(parts, mesh, rows), on_mesh(mesh, rows, mine.shape[rows], **options))
    for name, tensor in found.items():
        if name not in ("input", "output"):
            mesh.over("z", "data").all_reduce(tensor, "gradient").wait()
    return found


def check(sizes: Mapping[str, int], parts: Parts, rows: int = 0, **options: Any) -> None:
    wanted = dense(parts)

    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, sizes)
        found = results(mesh, parts, rows, **options)
        for name, tensor in cut(wanted, mesh, rows).items():
            close(found[name], tensor, wanted[name])

    wire.threads.launch(sizes["x"] * sizes["y"] * sizes.get("z", 1) * sizes.get("data", 1), body)


GRIDS = [sizes for world in (6, 8, 12) for sizes in grids(world) if sizes["x"] * sizes["y"] > 1]


@pytest.mark.parametrize("sizes", GRIDS, ids=lambda sizes: "x".join(map(str, sizes.values())))
def test_every_grid_has_the_results_of_one_process(sizes: Mapping[str, int]) -> None:
    check(sizes, whole(rows=(29,)), keep=sizes["z"] % 2 == 0)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("extent", [6, 7])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
def test_rows_may_be_cut_along_any_dim(rows: int, extent: int, keep: bool, chunks: int) -> None:
    lengths = [2, 3, 2]
    lengths[rows] = extent
    check({"x": 3, "y": 2}, whole(rows=lengths), rows, keep=keep, chunks=chunks)


@pytest.mark.parametrize(("x", "y"), [(3, 1), (1, 3), (3, 3)])
@pytest.mark.parametrize("chunks", [1, 2])
def test_bits_do_not_depend_on_overlap(x: int, y: int, chunks: int) -> None:
    def body(world: wire.World, overlap: bool) -> Parts:
        return results(wire.Mesh(world, {"x": x, "y": y}), whole(), overlap=overlap, chunks=chunks)

    runs = [wire.threads.launch(x * y, body, overlap) for overlap in (True, False)]
    for with_overlap, without in zip(*runs, strict=True):
        assert all(torch.equal(with_overlap[name], without[name]) for name in without)


@pytest.mark.parametrize(("x", "y"), [(4, 1), (1, 4), (2, 3)])
@pytest.mark.parametrize("chunks", [2, 5])
@pytest.mark.parametrize("sequence", [False, True])
def test_chunks_that_travel_while_others_are_multiplied(x: int, y: int, chunks: int, sequence: bool) -> None:
    parts = whole(rows=(3, 7))
    wanted = dense(parts)

    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"x": x, "y": y})
        if sequence:
            found, lies = results(mesh, parts, chunks=chunks), cut(wanted, mesh)
        else:
            lies = {name: part(tensor, LIES[name], mesh) for name, tensor in wanted.items()}
            own = {name: part(tensor, LIES[name], mesh) for name, tensor in parts.items()}
            found = run(own, whole_rows(mesh, chunks))
        for name, tensor in lies.items():
            close(found[name], tensor, wanted[name])

    wire.threads.launch(x * y, body)


def whole_rows(mesh: wire.Mesh, chunks: int) -> Linears:
    def linears(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], transposed: bool
    ) -> Sequence[Tensor]:
        contract, output = (mesh["y"], mesh["x"]) if transposed else (mesh["x"], mesh["y"])
        return product(x, weights, biases, contract=contract, output=output, chunks=chunks)

    return linears


def test_fewer_rows_than_ranks_and_none_at_all() -> None:
    check({"x": 2, "y": 3}, whole(rows=(2,)), chunks=2)
    check({"x": 2, "y": 3}, whole(rows=(2, 2)), rows=1, keep=True)


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_kept_for_backward_is_the_own_part_unless_asked(keep: bool) -> None:
    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"y": 4})
        x, weight = draw(2, 6, seed=1).requires_grad_(), draw(3, 6, seed=2).requires_grad_()
        kept: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            product(x, [weight], [None], contract=mesh["x"], output=mesh["y"], rows=0, keep=keep)
        assert sorted(kept) == sorted([(8 if keep else 2) * 6, 18])

    wire.threads.launch(4, body)


def test_sums_of_16_bits_are_rounded_once() -> None:
    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"y": 3})
        y = mesh["y"]
        x, weight = draw(6, 6, seed=1).bfloat16(), draw(5, 6, seed=2).bfloat16()
        mine, own = part(x, {"y": 1}, mesh), part(weight, {"y": 1}, mesh)
        (out,) = product(mine, [own], [None], contract=y, output=mesh["x"], rows=0)
        pairs = zip(x.tensor_split(3, 1), weight.tensor_split(3, 1), strict=True)
        first, second, third = ((one @ other.t()).float() for one, other in pairs)
        assert torch.equal(out, (first + second + third).bfloat16().tensor_split(3)[y.index])
        assert mesh.ledger.sent() == wire.formulas.reduce_scatter(3, 30 * 2)

    wire.threads.launch(3, body)


def test_shapes_without_values_are_those_with_them() -> None:
    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"x": 2, "y": 2})
        parts = whole(rows=(3, 5))
        real = results(mesh, parts, rows=1, keep=True)
        dry = run({name: tensor.to("meta") for name, tensor in cut(parts, mesh, 1).items()}, on_mesh(mesh, 1, 5))
        assert {name: tensor.shape for name, tensor in dry.items()} == {n: tensor.shape for n, tensor in real.items()}

    wire.threads.launch(4, body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 1}, "expected a dim of x .* other than its last, which is features, found 1"),
        ({"rows": -3}, "found -3"),
        ({"rows": 0, "total": 7}, r"of 7 along dim 0, rank 1 of 2 of axis y has 3, found x of \[4, 6\]"),
        ({"chunks": 0}, "chunks: expected at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(options: Mapping[str, Any], message: str) -> None:
    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"y": 2})
        if world.rank == 1:
            with pytest.raises(wire.UsageError, match=message):
                product(
                    draw(4, 6, seed=1), [draw(3, 6, seed=2)], [None], contract=mesh["x"], output=mesh["y"], **options
                )

    wire.threads.launch(2, body)
