"""SUMMA: 2D and 2.5D linears are those of one process, on square grids and others; bits do not depend on overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.placement.tensor.panels import panels
from fourfold.placement.tensor.summa import summa
from fourfold.torch_private import fake_tensors

from .grids import Linears, Parts, close, dense, draw, part, run, whole

WEIGHT, RESIDUAL = {"z": 1, "y": 0}, {"data": 0, "z": 0, "y": -1}
LIES: dict[str, Mapping[str, int]] = {
    "input": RESIDUAL,
    "output": RESIDUAL,
    **dict.fromkeys(("up", "gate", "down"), WEIGHT),
    **{name: {"y": 0} for name in ("up.bias", "down.bias")},
}
"""The grid's rows are z, its features y, its layers data."""


def on_mesh(mesh: wire.Mesh, widths: Sequence[int], **options: Any) -> Linears:
    def linears(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], transposed: bool
    ) -> Sequence[Tensor]:
        across: dict[str, Any] = {"rows": mesh["z"], "features": mesh["y"]}
        return summa(x, weights, biases, total=widths[transposed], **across, **options)

    return linears


def cut(parts: Parts, mesh: wire.Mesh) -> Parts:
    return {name: part(tensor, LIES[name], mesh) for name, tensor in parts.items()}


def results(world: wire.World, sizes: Mapping[str, int], parts: Parts, options: Mapping[str, Any]) -> Parts:
    mesh = wire.Mesh(world, sizes)
    hidden, width = parts["up"].shape
    found = run(cut(parts, mesh), on_mesh(mesh, (width, hidden), **options))
    for name, tensor in found.items():
        if name not in ("input", "output"):
            mesh["data"].all_reduce(tensor, "gradient").wait()
    return found


@pytest.mark.parametrize(
    "grid", [(1, 2, 1), (2, 2, 1), (3, 3, 1), (2, 2, 2), (2, 2, 3), (2, 3, 1), (3, 2, 2), (1, 4, 2), (4, 1, 1)]
)
@pytest.mark.parametrize("shape", [(13, 7, 11), (12, 6, 12), (2, 2, 3)])
def test_every_grid_has_the_results_of_one_process(grid: tuple[int, int, int], shape: tuple[int, int, int]) -> None:
    rows, features, layers = grid
    sizes = {"z": rows, "y": features, "data": layers}
    count, width, hidden = shape
    parts = whole(rows=(count, 2), width=width, hidden=hidden)
    wanted = dense(parts)

    def body(world: wire.World) -> None:
        found = results(world, sizes, parts, {})
        for name, tensor in cut(wanted, wire.Mesh(world, sizes)).items():
            close(found[name], tensor, wanted[name])

    wire.threads.launch(rows * features * layers, body)


@pytest.mark.parametrize("sizes", [{"z": 3, "y": 3}, {"z": 2, "y": 3}])
def test_bits_do_not_depend_on_overlap(sizes: Mapping[str, int]) -> None:
    size = sizes["z"] * sizes["y"]
    runs = [wire.threads.launch(size, results, sizes, whole(), {"overlap": overlap}) for overlap in (True, False)]
    for with_overlap, without in zip(*runs, strict=True):
        assert all(torch.equal(with_overlap[name], without[name]) for name in without)


@pytest.mark.parametrize("frozen", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("layout", ["out,in", "in,out"])
@pytest.mark.parametrize("together", [False, True])
def test_siblings_and_layouts(frozen: tuple[bool, bool], layout: str, together: bool) -> None:
    inputs, weights = draw(6, 5, seed=1), [draw(n, 5, seed=n) for n in (4, 3)]

    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"z": 2, "y": 2})
        x = part(inputs, RESIDUAL, mesh).requires_grad_()
        own = [part(weight, WEIGHT, mesh) for weight in weights]
        if together:
            flat = torch.cat([weight.flatten() for weight in own]).split([weight.numel() for weight in own])
            own = [piece.view_as(weight) for piece, weight in zip(flat, own, strict=True)]
        own = [weight.requires_grad_(not one) for weight, one in zip(own, frozen, strict=True)]
        given = own if layout == "out,in" else [weight.t().contiguous() for weight in own]
        across: dict[str, Any] = {"rows": mesh["z"], "features": mesh["y"], "total": 5, "layout": layout}
        outs = summa(x, given, [None, None], **across)
        torch.cat(outs, -1).square().sum().backward()

        dense_x = inputs.clone().requires_grad_()
        dense_weights = [weight.clone().requires_grad_() for weight in weights]
        wanted = [dense_x @ weight.t() for weight in dense_weights]
        torch.cat(wanted, -1).square().sum().backward()
        for out, want in zip(outs, wanted, strict=True):
            close(out, part(want, RESIDUAL, mesh), want)
        for found, dense_one, lies in [(x, dense_x, RESIDUAL), *zip(own, dense_weights, (WEIGHT,) * 2, strict=True)]:
            assert dense_one.grad is not None and (found.grad is not None) == found.requires_grad
            if found.grad is not None:
                close(found.grad, part(dense_one.grad, lies, mesh), dense_one.grad)

    wire.threads.launch(4, body)


def test_nothing_is_kept_or_sent_that_nobody_needs() -> None:
    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"z": 2, "y": 2})
        x, weight = draw(4, 3, seed=1), draw(2, 3, seed=2)
        kept: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            kept.append(tensor.data_ptr())
            return tensor

        across: dict[str, Any] = {"rows": mesh["z"], "features": mesh["y"]}
        for trains in (x, weight):
            kept.clear()
            x, weight = x.requires_grad_(trains is x), weight.requires_grad_(trains is weight)
            mesh.ledger.begin(mesh.ledger.step + 1)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                (out,) = summa(x, [weight], [None], **across)
            assert kept == [(weight if trains is x else x).data_ptr()]
            forward = mesh.ledger.sent(mesh.ledger.step)
            out.sum().backward()
            traffic = mesh.ledger.traffic(mesh.ledger.step)
            sent = {(flow.axis, flow.op): one.calls for flow, one in traffic.items()}
            assert mesh.ledger.sent(mesh.ledger.step) > forward
            assert sent == (
                {("y", "broadcast"): 2, ("z", "broadcast"): 4, ("y", "reduce"): 2}
                if trains is x
                else {("y", "broadcast"): 4, ("z", "broadcast"): 2, ("z", "reduce"): 2}
            )

    wire.threads.launch(4, body)


def test_shapes_without_values_are_those_with_them() -> None:
    def body(world: wire.World) -> None:
        mesh, parts = wire.Mesh(world, {"z": 2, "y": 3}), whole(rows=(3, 5))
        shapes = {name: tensor.shape for name, tensor in run(cut(parts, mesh), on_mesh(mesh, (7, 11))).items()}
        before = mesh.ledger.sent()
        dry = run({name: tensor.to("meta") for name, tensor in cut(parts, mesh).items()}, on_mesh(mesh, (7, 11)))
        assert {name: tensor.shape for name, tensor in dry.items()} == shapes
        if world.rank == 0:
            with fake_tensors():
                fake = {name: torch.empty(tensor.shape) for name, tensor in cut(parts, mesh).items()}
                assert {n: tensor.shape for n, tensor in run(fake, on_mesh(mesh, (7, 11))).items()} == shapes
        assert mesh.ledger.sent() == before

    wire.threads.launch(6, body)


def test_compiled_without_a_graph_break_the_bits_are_the_same() -> None:
    def loss(x: Tensor, weight: Tensor, bias: Tensor, mesh: wire.Mesh) -> Tensor:
        return summa(x, [weight], [bias], rows=mesh["z"], features=mesh["y"])[0].square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)

    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"z": 2, "y": 2})
        leaves = [draw(4, 3, seed=1), draw(2, 3, seed=2), draw(2, seed=3)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        wanted = torch.autograd.grad(loss(*leaves, mesh), leaves)  # pyright: ignore[reportCallIssue]
        eager = mesh.ledger.sent()
        found = torch.autograd.grad(compiled(*leaves, mesh), leaves)  # pyright: ignore[reportCallIssue]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert mesh.ledger.sent() == 2 * eager > 0

    wire.threads.launch(4, body)


# ---- panels


@pytest.mark.parametrize(("rows", "features"), [(1, 1), (3, 3), (2, 3), (4, 1)])
@pytest.mark.parametrize("total", [0, 1, 2, 12, 13])
def test_panels_are_every_feature_once_at_its_owners(rows: int, features: int, total: int) -> None:
    found = panels(total, rows, features)
    lefts, rights = [(one.left, one.inputs) for one in found], [(one.right, one.weights) for one in found]
    for lines, owners in ((features, lefts), (rows, rights)):
        cut_as = wire.formulas.shares(total, lines)
        seen = [sum(cut_as[:owner]) + at for owner, place in owners for at in range(place.start, place.stop)]
        assert seen == list(range(total))
    assert rows != features or len(found) == min(rows, total)


@pytest.mark.parametrize(
    ("x", "weight", "total", "message"),
    [
        ((4, 3), (2, 3), 5, "x: of 5 input features, rank 1 of 2 of axis y has 2, found 3"),
        ((4, 2), (2, 3), 5, "sibling 0: of 5 input features, rank 1 of 2 of axis z has 2, found 3"),
        ((4, 3), (2, 2), None, "sibling 0: of 6 input features"),
    ],
)
def test_what_does_not_fit_is_refused(
    x: tuple[int, int], weight: tuple[int, int], total: int | None, message: str
) -> None:
    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"z": 2, "y": 2})
        if world.rank == 3:
            with pytest.raises(wire.UsageError, match=message):
                summa(torch.ones(x), [torch.ones(weight)], [None], rows=mesh["z"], features=mesh["y"], total=total)

    wire.threads.launch(4, body)
