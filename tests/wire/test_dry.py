"""Dry axes: a rank of a grid of any size counts the bytes that it would send, and moves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.ledger import Flow, Ledger, Traffic
from fourfold.torch_private import fake_mode
from fourfold.wire import formulas, ops
from fourfold.wire.codecs import bf16
from fourfold.wire.dry import Dry, dry_mesh

UNEVEN = {2: (3, 1), 3: (1, 4, 0), 4: (2, 0, 3, 1), 5: (1, 2, 0, 5, 3)}


def every_op(axis: wire.Axis, sizes: tuple[int, ...], device: str) -> None:
    """Every pair, even and uneven, along the first and the last dim, forward and backward."""
    total = sum(sizes)
    for cut in (sizes, None):
        whole, mine = (total, sizes[axis.index]) if cut else (2 * axis.size, 2)
        for dim in (0, -1):
            part = torch.ones((mine, 3) if dim == 0 else (3, mine), dtype=torch.float64, device=device)
            full = torch.ones((whole, 3) if dim == 0 else (3, whole), dtype=torch.float64, device=device)
            for name, x in (
                ("gather_cut", part),
                ("gather_scatter", part),
                ("cut_gather", full),
                ("scatter_gather", full),
            ):
                x = x.clone().requires_grad_()
                y = getattr(ops, name)(x, axis, dim=dim, sizes=cut)
                assert y.shape == (part.shape if x.shape == full.shape else full.shape) and y.is_contiguous()
                y.sum().backward()
                assert x.grad is not None and x.grad.shape == x.shape
    for pair in (ops.sum_identity, ops.identity_sum, ops.sum_sum):
        x = torch.ones(5, 3, dtype=torch.bfloat16, device=device).requires_grad_()
        pair(x, axis, "embedding").sum().backward()


def plainly(flows: dict[Flow, Traffic]) -> dict[Flow, tuple[int, int]]:
    return {flow: (one.calls, one.bytes) for flow, one in flows.items()}


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("device", ["cpu", "meta", "fake"])
def test_every_op_counts_dry_what_it_counts_for_real(size: int, device: str) -> None:
    def real(world: wire.World) -> Ledger:
        axis = wire.Mesh(world, {"y": size})["y"]
        every_op(axis, UNEVEN[size], "cpu")
        return axis.ledger

    for index, ledger in enumerate(wire.threads.launch(size, real)):
        axis = Dry("y", size, index)
        if device == "fake":
            with fake_mode():
                every_op(axis, UNEVEN[size], "cpu")
        else:
            every_op(axis, UNEVEN[size], device)
        assert plainly(axis.ledger.traffic()) == plainly(ledger.traffic())


@pytest.mark.parametrize("coded", [False, True])
def test_every_collective_counts_dry_what_it_counts_for_real_and_signs_the_same(coded: bool) -> None:
    codec = bf16.Codec() if coded else None

    def body(mesh: wire.Mesh, device: str) -> tuple[dict[Flow, tuple[int, int]], int]:
        axis, sizes = mesh.part("y", 3), (4, 0, 3)
        part, whole = torch.ones(5, device=device), torch.ones(15, device=device)
        axis.all_reduce(part, "gradient", codec=codec).wait()
        axis.all_gather(whole, part, "weight", codec=codec).wait()
        axis.reduce_scatter(part, whole, "gradient", codec=codec).wait()
        axis.broadcast(part, 1, "weight", codec=codec).wait()
        axis.reduce(part, 1, "weight", codec=codec).wait()
        axis.all_to_all(torch.empty_like(whole), whole, "activation", codec=codec).wait()
        mine, full = torch.ones(sizes[axis.index], device=device), torch.ones(7, device=device)
        axis.all_gather(full, mine, "weight", sizes=sizes, codec=codec).wait()
        axis.reduce_scatter(mine, full, "gradient", sizes=sizes, codec=codec).wait()
        sending = axis.send(part, (axis.index + 1) % 3, "activation", codec=codec)
        axis.receive(part.clone(), (axis.index - 1) % 3, "activation", codec=codec).wait()
        sending.wait()
        axis.barrier()
        mesh.over("x", "y").collect([1.0])
        return plainly(mesh.ledger.traffic()), mesh.digest()

    sizes = {"x": 2, "y": 6}
    real = wire.threads.launch(12, lambda world: body(wire.Mesh(world, sizes), "cpu"))
    for device in ("cpu", "meta"):
        assert [body(dry_mesh(sizes, rank), device) for rank in range(12)] == real


def test_what_arrives_is_made_up_of_this_ranks_own() -> None:
    axis = Dry("y", 3, 1)
    x = torch.tensor([1.0, 2.0])
    axis.all_reduce(x, "gradient", codec=bf16.Codec()).wait()
    axis.broadcast(x, 0, "weight").wait()
    assert x.tolist() == [1.0, 2.0]
    assert ops.gather_cut(x, axis).tolist() == [1.0, 2.0] * 3
    assert ops.gather_cut(x, axis, sizes=(1, 2, 3)).tolist() == [0.0, 1.0, 2.0, 0.0, 0.0, 0.0]
    assert ops.scatter_gather(torch.arange(6.0), axis).tolist() == [2.0, 3.0]
    assert ops.scatter_gather(torch.arange(6.0), axis, sizes=(1, 2, 3)).tolist() == [1.0, 2.0]
    out = torch.full((6,), 9.0)
    axis.all_to_all(out, torch.arange(6.0), "activation").wait()
    assert out.tolist() == [0.0, 0.0, 2.0, 3.0, 0.0, 0.0]
    axis.receive(out, 0, "activation").wait()
    assert out.tolist() == [0.0] * 6


def test_nothing_is_under_way() -> None:
    axis = Dry("y", 4, 3)
    works = [axis.all_reduce(torch.ones(2), "gradient"), axis.receive(torch.ones(2), 0, "activation")]
    assert [work.done for work in works] == [True, True] and axis.under_way == 0


@pytest.mark.parametrize("rank", [0, 12_345, 32_767])
def test_a_rank_of_a_huge_grid_counts_by_the_formulas(rank: int) -> None:
    sizes = {"x": 4, "y": 8, "z": 16, "data": 64}
    mesh = dry_mesh(sizes, rank)
    assert mesh.coordinates["data"] == rank // 512
    assert isinstance(mesh.over("x", "y", "z", "data").members, range), "the world is never listed"
    activation = torch.empty(4096, 2048, dtype=torch.bfloat16, device="meta", requires_grad=True)
    ops.sum_identity(ops.identity_sum(activation, mesh["y"]), mesh["x"]).sum().backward()
    everybody = mesh.over("x", "y", "z", "data")
    weight = torch.empty(3, device="meta")
    everybody.all_gather(torch.empty(3 * 32_768, device="meta"), weight, "weight").wait()
    copies = mesh.part("y", 4)
    copies.all_reduce(torch.empty(7, device="meta"), "gradient").wait()
    whole = activation.nbytes
    assert plainly(mesh.ledger.traffic()) == {
        Flow("x", "activation", "all_reduce"): (1, formulas.all_reduce(4, whole, 2, mesh["x"].index)),
        Flow("y", "activation-gradient", "all_reduce"): (1, formulas.all_reduce(8, whole, 2, mesh["y"].index)),
        Flow("x+y+z+data", "weight", "all_gather"): (1, 12 * 32_767),
        Flow("y/4", "gradient", "all_reduce"): (1, formulas.all_reduce(4, 28, 4, copies.index)),
    }


def test_a_dry_mesh_has_the_members_of_a_real_one() -> None:
    sizes = {"x": 2, "y": 2, "z": 3, "data": 2}

    def members(mesh: wire.Mesh) -> list[tuple[str, int, list[int]]]:
        products = [("x",), ("y",), ("x", "z"), ("y", "data"), ("x", "y", "z", "data"), ("pipe",)]
        axes = [mesh.over(*names) for names in products] + [mesh.part("z+data", 3), mesh.part("z+data", 2)]
        return [(axis.name, axis.index, list(axis.members)) for axis in axes]

    real = wire.threads.launch(24, lambda world: members(wire.Mesh(world, sizes)))
    assert [members(dry_mesh(sizes, rank)) for rank in range(24)] == real


def test_the_ledger_may_be_given_and_names_the_rank() -> None:
    ledger = Ledger(rank=7)
    assert dry_mesh({"y": 8}, 7, ledger)["y"].ledger is ledger
    assert dry_mesh({"y": 8}, 7).ledger.rank == Dry("y", 8, 7).ledger.rank == 7


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Dry("y", 4, 4), r"dry axis y: expected one of its 4 ranks \(0 … 3\), found 4"),
        (lambda: dry_mesh({"y": 4, "z": 2}, 8), r"dry mesh: expected one of its 8 ranks \(0 … 7\), found 8"),
        (lambda: dry_mesh({"yy": 4}), "no axis 'yy'"),
    ],
)
def test_ranks_that_cannot_be(make: Callable[[], object], says: str) -> None:
    with pytest.raises(wire.UsageError, match=says):
        make()


def test_compiled_over_a_dry_axis_bytes_count_once_a_run() -> None:
    axis = Dry("y", 3, 0)

    def body(x: Tensor) -> Tensor:
        return ops.scatter_gather(ops.gather_scatter(x.sin(), axis, sizes=(2, 1, 4)), axis, sizes=(2, 1, 4)).sum()

    ledgers = []
    try:
        compiled = torch.compile(body, backend="aot_eager", fullgraph=True)
        for step, function in enumerate((body, compiled, compiled)):
            axis.ledger.begin(step)
            function(torch.ones(2, 2, dtype=torch.float64).requires_grad_()).backward()
            ledgers.append(plainly(axis.ledger.traffic(step)))
    finally:
        torch.compiler.reset()
    assert ledgers[0] == ledgers[1] == ledgers[2] != {}
