"""Linears cut over two axes are those of one process, on every grid; bits do not depend on overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.ledger import Flow
from fourfold.placement.tensor import siblings
from fourfold.placement.tensor.product import product
from fourfold.torch_private import fake_tensors

from .grids import LIES, Linears, Parts, close, dense, draw, grids, part, run, whole


def on_mesh(mesh: wire.Mesh, **options: Any) -> Linears:
    """The layers of a rank: a normal one sums its output over x, a transposed one over y."""

    def linears(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], transposed: bool
    ) -> Sequence[Tensor]:
        contract, output = (mesh["y"], mesh["x"]) if transposed else (mesh["x"], mesh["y"])
        return product(x, weights, biases, contract=contract, output=output, **options)

    return linears


def cuts(name: str) -> Mapping[str, int]:
    """Rows of the batch lie over z and data as well, weights are whole over them."""
    rows = {"z": 0, "data": 0} if name in ("input", "output") else {}
    return rows | LIES[name]


def cut(parts: Parts, mesh: wire.Mesh) -> Parts:
    return {name: part(tensor, cuts(name), mesh) for name, tensor in parts.items()}


def body(world: wire.World, sizes: Mapping[str, int], parts: Parts, options: Mapping[str, Any]) -> Parts:
    """One rank's results; gradients of weights are summed over the ranks with other rows."""
    mesh = wire.Mesh(world, sizes)
    found = run(cut(parts, mesh), on_mesh(mesh, **options))
    for name, tensor in found.items():
        if name not in ("input", "output"):
            mesh.over("z", "data").all_reduce(tensor, "gradient").wait()
    return found


GRIDS = [sizes for world in (6, 8, 12) for sizes in grids(world)]


@pytest.mark.parametrize("sizes", GRIDS, ids=lambda sizes: "x".join(map(str, sizes.values())))
def test_every_grid_has_the_results_of_one_process(sizes: Mapping[str, int]) -> None:
    parts = whole()
    wanted = dense(parts)

    def check(world: wire.World) -> None:
        found = body(world, sizes, parts, {})
        for name, tensor in cut(wanted, wire.Mesh(world, sizes)).items():
            close(found[name], tensor, wanted[name])

    size = sizes["x"] * sizes["y"] * sizes["z"] * sizes["data"]
    wire.threads.launch(size, check)


@pytest.mark.parametrize(("x", "y"), [(3, 1), (1, 3), (3, 3)])
def test_bits_do_not_depend_on_overlap(x: int, y: int) -> None:
    sizes = {"x": x, "y": y}
    runs = [wire.threads.launch(x * y, body, sizes, whole(), {"overlap": overlap}) for overlap in (True, False)]
    for with_overlap, without in zip(*runs, strict=True):
        assert with_overlap.keys() == without.keys() == whole().keys() | {"output"}
        assert all(torch.equal(with_overlap[name], without[name]) for name in without)


def test_more_dims_and_rows_that_do_not_follow_each_other() -> None:
    parts = whole(rows=(3, 2, 4))
    parts["input"] = parts["input"].transpose(0, 1)
    wanted = dense(parts)

    def check(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"x": 2, "y": 2})
        own = {name: part(tensor, LIES[name], mesh) for name, tensor in parts.items()}
        own["input"] = own["input"].transpose(0, 1).contiguous().transpose(0, 1)
        found = run(own, on_mesh(mesh))
        for name, tensor in wanted.items():
            close(found[name], part(tensor, LIES[name], mesh), tensor)

    wire.threads.launch(4, check)


# ---- siblings


def side_by_side(mesh: wire.Mesh, frozen: Sequence[bool] = (False,) * 3) -> tuple[Tensor, list[Tensor]]:
    """An input and three weights that follow each other in one storage."""
    x = part(draw(5, 6, seed=1), {"x": 1}, mesh).requires_grad_()
    weights = [part(draw(n, 6, seed=n), {"x": 1, "y": 0}, mesh) for n in (4, 2, 6)]
    arena = torch.cat([weight.flatten() for weight in weights])
    views = [flat.view(-1, x.shape[1]) for flat in arena.split([weight.numel() for weight in weights])]
    return x, [view.requires_grad_(not one) for view, one in zip(views, frozen, strict=True)]


@pytest.mark.parametrize("frozen", [(False, False, False), (True, False, False), (False, True, False), (True,) * 3])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("layout", ["out,in", "in,out"])
def test_siblings_one_by_one_or_together_give_the_same(frozen: tuple[bool, ...], apart: bool, layout: str) -> None:
    def check(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"x": 2, "y": 2})
        x, weights = side_by_side(mesh, frozen)
        if layout == "in,out":
            weights = [weight.detach().t().contiguous().requires_grad_(weight.requires_grad) for weight in weights]
        if apart:
            weights = [weight.detach().clone().requires_grad_(weight.requires_grad) for weight in weights]
        leaves = [x, *(weight for weight in weights if weight.requires_grad)]
        across: dict[str, Any] = {"contract": mesh["x"], "output": mesh["y"], "layout": layout}

        together = product(x, weights, [None] * 3, **across)
        alone = [product(x, [weight], [None], **across)[0] for weight in weights]
        for one, other in zip(together, alone, strict=True):
            close(one, other, other)
        found = torch.autograd.grad([out.square().sum() for out in together], leaves)
        wanted = torch.autograd.grad([out.square().sum() for out in alone], leaves)
        for one, other in zip(found, wanted, strict=True):
            close(one, other, other)

    wire.threads.launch(4, check)


def test_siblings_send_one_message_each_way() -> None:
    def check(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"x": 2, "y": 2})
        x, weights = side_by_side(mesh)
        outs = product(x, weights, [None] * 3, contract=mesh["x"], output=mesh["y"])
        torch.cat(outs, -1).sum().backward()
        assert {flow: traffic.calls for flow, traffic in mesh.ledger.traffic().items()} == {
            Flow("x", "activation", "all_reduce"): 1,
            Flow("y", "activation-gradient", "all_reduce"): 1,
        }

    wire.threads.launch(4, check)


def test_siblings_side_by_side_are_one_multiplication_each_way() -> None:
    arena = draw(12, 6, seed=0)
    weights = list(arena.split([4, 2, 6]))
    (whole_block,) = siblings.matrices(weights, turned=False)
    assert whole_block.data_ptr() == arena.data_ptr() and torch.equal(whole_block, arena.t())
    assert len(siblings.matrices([weight.clone() for weight in weights], turned=False)) == 3
    assert len(siblings.matrices([weights[0], weights[2]], turned=False)) == 2
    assert len(siblings.matrices([weights[1], weights[0]], turned=False)) == 2


# ---- nothing that nobody needs


def test_without_gradients_to_compute_nothing_is_kept_or_sent() -> None:
    def check(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"x": 2, "y": 2})
        x, weights = side_by_side(mesh)
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        across: dict[str, Any] = {"contract": mesh["x"], "output": mesh["y"]}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            (out, *_) = product(x.detach(), weights, [None] * 3, **across)
        assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
        out.sum().backward()
        assert mesh.ledger.sent(axis="y") == 0, "an input without a gradient takes no sum"

        kept.clear()
        frozen = [weight.detach() for weight in weights]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            product(x, frozen, [None] * 3, **across)
        assert [tensor.data_ptr() for tensor in kept] == [weight.data_ptr() for weight in frozen]

    wire.threads.launch(4, check)


def test_only_a_bias_is_trained() -> None:
    def check(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"x": 2, "y": 2})
        x, weights = side_by_side(mesh, (True,) * 3)
        biases = [None, torch.zeros(weights[1].shape[0], dtype=x.dtype, requires_grad=True), None]
        outs = product(x.detach(), weights, biases, contract=mesh["x"], output=mesh["y"])
        outs[1].sum().backward()
        assert biases[1] is not None and torch.equal(biases[1].grad, torch.full_like(biases[1], 5.0))  # pyright: ignore

    wire.threads.launch(4, check)


# ---- 16 bits


def test_sums_cross_as_the_activation_and_are_rounded_once() -> None:
    def check(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"x": 3})
        x, weight = draw(4, 6, seed=1).bfloat16(), draw(5, 6, seed=2).bfloat16()
        mine, own = part(x, {"x": 1}, mesh), part(weight, {"x": 1}, mesh)
        (out,) = product(mine, [own], [None], contract=mesh["x"], output=mesh["y"])
        shares = [(x.tensor_split(3, 1)[rank] @ weight.tensor_split(3, 1)[rank].t()).float() for rank in range(3)]
        assert torch.equal(out, (shares[0] + shares[1] + shares[2]).bfloat16())
        assert mesh.ledger.sent() == wire.formulas.all_reduce(3, 20 * 2, 2, mesh["x"].index)

    wire.threads.launch(3, check)


# ---- without values


def test_shapes_without_values_are_those_with_them() -> None:
    def check(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"x": 2, "y": 2})
        parts = {name: part(tensor, LIES[name], mesh) for name, tensor in whole().items()}
        shapes = {name: tensor.shape for name, tensor in run(parts, on_mesh(mesh)).items()}
        before = mesh.ledger.sent()
        dry = run({name: tensor.to("meta") for name, tensor in parts.items()}, on_mesh(mesh))
        assert {name: tensor.shape for name, tensor in dry.items()} == shapes
        if world.rank == 0:
            with fake_tensors():
                fake = run({name: torch.empty(tensor.shape) for name, tensor in parts.items()}, on_mesh(mesh))
            assert {name: tensor.shape for name, tensor in fake.items()} == shapes
        assert mesh.ledger.sent() == before

    wire.threads.launch(4, check)


def test_compiled_without_a_graph_break_the_bits_are_the_same() -> None:
    def loss(x: Tensor, weights: list[Tensor], bias: Tensor, mesh: wire.Mesh) -> Tensor:
        outs = product(x, weights, [bias, None, None], contract=mesh["x"], output=mesh["y"])
        return torch.cat(outs, -1).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)

    def check(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"x": 2, "y": 2})
        x, weights = side_by_side(mesh)
        bias = torch.ones(weights[0].shape[0], dtype=x.dtype, requires_grad=True)
        leaves = [x, *weights, bias]
        wanted = torch.autograd.grad(loss(x, weights, bias, mesh), leaves)
        eager = mesh.ledger.sent()
        found = torch.autograd.grad(compiled(x, weights, bias, mesh), leaves)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert mesh.ledger.sent() == 2 * eager > 0

    wire.threads.launch(4, check)


# ---- what does not fit


@pytest.mark.parametrize(
    ("weight", "layout", "message"),
    [
        ((3, 5), "out,in", r"sibling 0: expected a weight \[N, K\] with this rank's K = 4 input features"),
        ((4, 3), "out,in", r"found \[4, 3\]"),
        ((3, 4), "in,out", r"expected a weight \[K, N\]"),
        ((3, 4), "out-in", r"expected one of 'out,in', 'in,out', found 'out-in'"),
    ],
)
def test_what_does_not_fit_is_refused(weight: tuple[int, int], layout: str, message: str) -> None:
    def check(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"x": 2})
        with pytest.raises(wire.UsageError, match=message):
            product(torch.ones(2, 4), [torch.ones(weight)], [None], contract=mesh["x"], output=mesh["y"], layout=layout)

    wire.threads.launch(2, check)
