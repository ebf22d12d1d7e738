"""The ops as torch sees them: shapes, layouts, copies, refusals, registration, dynamic graphs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.torch_private import fake_mode
from fourfold.wire import ops
from fourfold.wire.dry import Dry

PAIRS = ("gather_cut", "cut_gather", "gather_scatter", "scatter_gather")


def on(size: int, body):
    return wire.threads.launch(size, lambda world: body(wire.Mesh(world, {"y": size})["y"]), timeout=60)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_gathered_parts_lie_in_rank_order() -> None:
    def body(axis: wire.Axis) -> Tensor:
        return ops.gather_cut(torch.full((2, 2), float(axis.index)), axis, dim=1)

    want = torch.tensor([[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 2)
    assert all(torch.equal(out, want) and out.is_contiguous() for out in on(3, body))


def test_tensors_that_are_not_contiguous_are_taken() -> None:
    def body(axis: wire.Axis) -> tuple[Tensor, Tensor]:
        return ops.sum_identity(draw(3, 4).t(), axis), ops.gather_cut(draw(3, 4).t(), axis, dim=0)

    for summed, gathered in on(2, body):
        assert torch.equal(summed, draw(3, 4).t() * 2)
        assert torch.equal(gathered, torch.cat([draw(3, 4).t()] * 2))


def test_identity_copies_nothing() -> None:
    def body(axis: wire.Axis) -> bool:
        x = draw(4).requires_grad_()
        return ops.identity_sum(x, axis).data_ptr() == x.data_ptr()

    assert on(2, body) == [True, True]


@pytest.mark.parametrize("name", [*PAIRS, "sum_identity", "identity_sum", "sum_sum"])
@pytest.mark.parametrize("fake", [False, True])
def test_shapes_alone_reach_no_channel_and_count_nothing(name: str, fake: bool) -> None:
    """On meta and in fake mode an op of a real axis gives the shape, forward and backward, without a word to others."""
    sizes = (2, 0, 3)

    def body(axis: wire.Axis) -> None:
        if axis.index != 1:
            return
        with fake_mode() if fake else nullcontext():
            for given in (sizes, None) if name in PAIRS else (None,):
                extent, whole = (sizes[1], 5) if given else (2, 6)
                if name.startswith(("gather", "identity", "sum")):
                    x = torch.empty(4, extent, 2, device="cpu" if fake else "meta").transpose(0, 2).requires_grad_()
                else:
                    x = torch.empty(2, whole, 4, device="cpu" if fake else "meta").requires_grad_()
                more = {"dim": 1, "sizes": given} if name in PAIRS else {}
                y = getattr(ops, name)(x, axis, **more)
                y.sum().backward()
                extents = {"gather": whole, "cut": extent, "scatter": extent}
                assert y.shape[1] == extents.get(name.split("_")[0], extent) and x.grad is not None
                assert y.is_contiguous() or name == "identity_sum"
        assert axis.calls == 0 and axis.ledger.sent() == 0

    on(3, body)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, axis: ops.gather_cut(x, axis, dim=2), r"shape \(2, 5\) has no dim 2"),
        (lambda x, axis: ops.gather_cut(x, axis, sizes=(5, 5, 5)), "expected `sizes` of 2 extents, found .5, 5, 5"),
        (lambda x, axis: ops.gather_scatter(x, axis, sizes=(4, 4)), r"an extent of 4 in dim 1, but its part has"),
        (lambda x, axis: ops.cut_gather(x, axis, sizes=(2, 2)), r"add up to dim -1 of a tensor of shape \(2, 5\)"),
        (lambda x, axis: ops.scatter_gather(x, axis, sizes=(6, -1)), "of 2 extents, found .6, -1"),
        (lambda x, axis: ops.scatter_gather(x, axis), "does not divide by 2 ranks; say `sizes`"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parts_that_cannot_be_are_refused_before_anything_moves(call, says: str, device: str) -> None:
    def body(axis: wire.Axis) -> int:
        with pytest.raises(wire.UsageError, match=says):
            call(torch.ones(2, 5, device=device), axis)
        return axis.calls

    assert on(2, body) == [0, 0]


@pytest.mark.parametrize("dim", [0, 1])
def test_along_the_first_dim_nothing_is_packed(dim: int) -> None:
    """What is handed to the axis is the tensor itself, and what came is the result; else one copy is made."""

    def body(axis: wire.Axis) -> tuple[bool, bool]:
        seen = {}
        gather, scatter = axis.all_gather, axis.reduce_scatter
        axis.all_gather = lambda out, shard, *a, **k: seen.update(out=out) or gather(out, shard, *a, **k)
        axis.reduce_scatter = lambda out, full, *a, **k: seen.update(full=full) or scatter(out, full, *a, **k)
        x = draw(6, 6)
        same = []
        for sizes in (None, (1, 2, 3)):
            ops.scatter_gather(x, axis, dim=dim, sizes=sizes)
            mine = x.split(sizes or 2, dim)[axis.index]
            whole = ops.gather_cut(mine, axis, dim=dim, sizes=sizes)
            same.append(seen["full"].data_ptr() == x.data_ptr() and seen["out"].data_ptr() == whole.data_ptr())
        return tuple(same)

    assert on(3, body) == [(dim == 0, dim == 0)] * 3


def test_a_dim_that_does_not_divide_is_refused() -> None:
    def body(axis: wire.Axis) -> None:
        with pytest.raises(wire.UsageError, match=r"dim -1 of a tensor of shape \(2, 5\) does not divide by 2 ranks"):
            ops.cut_gather(draw(2, 5), axis)

    on(2, body)


def test_one_graph_serves_every_size_of_a_dynamic_dim() -> None:
    axis = Dry("y", 3, 1)
    traced = []

    def body(x: Tensor) -> Tensor:
        x = ops.scatter_gather(ops.gather_cut(x.sin(), axis, dim=1), axis, dim=0)
        return ops.cut_gather(ops.gather_scatter(x, axis, dim=0), axis, dim=1)

    def backend(graph, example):
        traced.append(graph)
        return graph

    try:
        compiled = torch.compile(body, backend=backend, fullgraph=True, dynamic=True)
        for rows in (3, 6, 9, 12):
            x, y = draw(rows, 4).requires_grad_(), draw(rows, 4).requires_grad_()
            found, want = compiled(x), body(y)
            found.square().sum().backward()
            want.square().sum().backward()
            assert torch.equal(found, want) and x.grad is not None and y.grad is not None
            assert torch.equal(x.grad, y.grad)
        assert len(traced) == 1
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("name", ["sum_identity", "sum_sum", *PAIRS])
def test_registration_passes_torch_own_checks(name: str) -> None:
    """On dry axes of several ranks: the checks run an op at their own times, for which no other rank could wait."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    op = getattr(torch.ops.fourfold, name).default
    for index in range(3):
        axis = Dry("y", 3, index)
        sizes = (1, 4, 1)
        for dim, given in ((0, None), (-1, None), (0, sizes), (-1, sizes)) if name in PAIRS else ((None, None),):
            extent = sizes[index] if given and name.startswith("gather") else 6
            x = draw(*((extent, 3) if dim == 0 else (3, extent))).requires_grad_()
            more = (dim, given) if name in PAIRS else ()
            verdicts = torch.library.opcheck(op, (x, axis.key, "activation", *more), test_utils=tests)
            assert verdicts == dict.fromkeys(tests, "SUCCESS")
