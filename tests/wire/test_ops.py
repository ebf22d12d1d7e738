"""The conjugate pairs: cut networks have the gradients of whole ones, compiled or not; bytes count once a run."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fourfold import wire
from fourfold.ledger import Flow
from fourfold.torch_private import fake_mode
from fourfold.wire import formulas, ops
from fourfold.wire.dry import Dry

SIZES = (1, 2, 3, 4)
UNEVEN = {1: (4,), 2: (3, 1), 3: (1, 4, 0), 4: (2, 0, 3, 1), 5: (1, 2, 0, 5, 3)}
PAIRS = ("gather_cut", "cut_gather", "gather_scatter", "scatter_gather")


def on(size: int, body):
    return wire.threads.launch(size, lambda world: body(wire.Mesh(world, {"y": size})["y"]), timeout=60)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_a_perceptron_cut_over_an_axis_has_the_gradients_of_the_whole(size: int) -> None:
    up, down, x = draw(12, 5, seed=1), draw(5, 12, seed=2), draw(7, 5)

    def whole() -> list[Tensor]:
        weights = [t.clone().requires_grad_() for t in (x, up, down)]
        (functional.gelu(weights[0] @ weights[1].t()) @ weights[2].t()).square().sum().backward()
        return [t.grad for t in weights if t.grad is not None]

    def cut(axis: wire.Axis) -> list[Tensor | None]:
        mine_up = up.chunk(size)[axis.index].clone().requires_grad_()
        mine_down = down.chunk(size, 1)[axis.index].clone().requires_grad_()
        mine_x = x.clone().requires_grad_()
        hidden = functional.gelu(ops.identity_sum(mine_x, axis) @ mine_up.t())
        ops.sum_identity(hidden @ mine_down.t(), axis).square().sum().backward()
        return [mine_x.grad, mine_up.grad, mine_down.grad]

    dx, dup, ddown = whole()
    parts = on(size, cut)
    assert all(torch.allclose(part[0], dx, rtol=1e-12, atol=1e-12) for part in parts)
    assert torch.allclose(torch.cat([part[1] for part in parts]), dup, rtol=1e-12, atol=1e-12)
    assert torch.allclose(torch.cat([part[2] for part in parts], 1), ddown, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_and_cut_along_any_dim_check_against_differences(size: int, dim: int) -> None:
    def body(axis: wire.Axis) -> bool:
        def there_and_back(x: Tensor) -> Tensor:
            mine = ops.cut_gather(x, axis, dim=dim)
            return ops.gather_cut(mine.sin() * (axis.index + 1), axis, dim=dim)

        x = draw(12, 12)[: 12 if dim == 0 else 2, : 2 if dim == 0 else 12].contiguous().requires_grad_()
        return torch.autograd.gradcheck(there_and_back, (x,))

    assert on(size, body) == [True] * size


@pytest.mark.parametrize("size", UNEVEN)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_uneven_gather_and_cut_check_against_differences(size: int, dim: int) -> None:
    sizes = UNEVEN[size]

    def body(axis: wire.Axis) -> bool:
        def there_and_back(x: Tensor) -> Tensor:
            mine = ops.cut_gather(x, axis, dim=dim, sizes=sizes)
            return ops.gather_cut(mine.sin() * (axis.index + 1), axis, dim=dim, sizes=sizes)

        shape = [2, 2]
        shape[dim] = sum(sizes)
        return torch.autograd.gradcheck(there_and_back, (draw(*shape).requires_grad_(),))

    assert on(size, body) == [True] * size


def shape_of(dim: int, extent: int) -> list[int]:
    shape = [3, 2, 4]
    shape[dim] = extent
    return shape


@pytest.mark.parametrize("size", UNEVEN)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("even", [False, True])
def test_gather_scatter_and_scatter_gather_are_conjugate(size: int, dim: int, even: bool) -> None:
    """Every rank applies a function of its own to the whole; the parts of the sum of their results are the loss."""
    sizes = (2,) * size if even else UNEVEN[size]
    whole = draw(*shape_of(dim, sum(sizes)))
    weight = draw(*whole.shape, seed=1)

    def alone() -> tuple[Tensor, Tensor]:
        x = whole.clone().requires_grad_()
        y = torch.stack([(x * (rank + 1)).sin() for rank in range(size)]).sum(0)
        (y.cos() * weight).sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    def cut(axis: wire.Axis) -> tuple[Tensor, Tensor | None]:
        given = None if even else sizes
        x = whole.split(sizes, dim)[axis.index].clone().requires_grad_()
        y = (ops.gather_scatter(x, axis, dim=dim, sizes=given) * (axis.index + 1)).sin()
        y = ops.scatter_gather(y, axis, dim=dim, sizes=given)
        assert y.is_contiguous()
        (y.cos() * weight.split(sizes, dim)[axis.index]).sum().backward()
        return y.detach(), x.grad

    wanted, gradient = alone()
    parts = on(size, cut)
    for found, want in (
        (torch.cat([p[0] for p in parts], dim), wanted),
        (torch.cat([p[1] for p in parts], dim), gradient),
    ):
        assert (found - want).abs().max() <= 1e-12 * want.abs().max()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_perceptron_of_cut_rows_has_the_gradients_of_the_whole(dim: int) -> None:
    """Sequence parallelism: tokens are cut between the linears, unevenly; gathered before and scattered after them."""
    size, sizes = 3, (2, 1, 4)
    up, down, x = draw(12, 5, seed=1), draw(5, 12, seed=2), draw(*((7, 2, 5) if dim == 0 else (2, 7, 5)))

    def whole() -> list[Tensor]:
        weights = [t.clone().requires_grad_() for t in (x, up, down)]
        (functional.gelu(weights[0].sin() @ weights[1].t()) @ weights[2].t()).square().sum().backward()
        return [t.grad for t in weights if t.grad is not None]

    def cut(axis: wire.Axis) -> list[Tensor | None]:
        mine_up = up.chunk(size)[axis.index].clone().requires_grad_()
        mine_down = down.chunk(size, 1)[axis.index].clone().requires_grad_()
        mine_x = x.split(sizes, dim)[axis.index].clone().requires_grad_()
        hidden = functional.gelu(ops.gather_scatter(mine_x.sin(), axis, dim=dim, sizes=sizes) @ mine_up.t())
        ops.scatter_gather(hidden @ mine_down.t(), axis, dim=dim, sizes=sizes).square().sum().backward()
        return [mine_x.grad, mine_up.grad, mine_down.grad]

    for at, (want, part) in enumerate(zip(whole(), zip(*on(size, cut), strict=True), strict=True)):
        found = torch.cat(part, (dim, 0, 1)[at])
        assert (found - want).abs().max() <= 1e-12 * want.abs().max()


def test_a_scattered_sum_has_the_bits_of_the_whole_sum() -> None:
    """Also in 16 bits, which are added up in float32 and rounded once; and whatever the layout of what is summed."""

    def body(axis: wire.Axis) -> None:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = (draw(8, 6, seed=axis.index) * 100).to(dtype).t()
            total = ops.sum_identity(x, axis)
            for dim, sizes in ((0, None), (0, (1, 0, 2, 3)), (1, None), (1, (0, 5, 1, 2))):
                each = sizes or (x.shape[dim] // 4,) * 4
                if sum(each) == x.shape[dim]:
                    mine = ops.scatter_gather(x, axis, dim=dim, sizes=sizes)
                    assert mine.dtype == dtype and torch.equal(mine, total.split(each, dim)[axis.index])

    on(4, body)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_forward_and_backward_cost_what_the_formulas_say(size: int, even: bool, name: str) -> None:
    sizes = (2,) * size if even else UNEVEN[size]
    parts = [3 * 4 * 8 * n for n in sizes]  # bytes of each rank's part: (3, n, 4) doubles

    def body(axis: wire.Axis) -> dict[Flow, tuple[int, int]]:
        extent = sizes[axis.index] if name.startswith("gather") else sum(sizes)
        x = draw(3, extent, 4).requires_grad_()
        getattr(ops, name)(x, axis, dim=1, sizes=None if even else sizes).sum().backward()
        return {flow: (one.calls, one.bytes) for flow, one in axis.ledger.traffic().items()}

    for index, metered in enumerate(on(size, body)):
        cost = {
            "gather": ("all_gather", (1, formulas.all_gather_of_parts(parts, index))),
            "scatter": ("reduce_scatter", (1, formulas.reduce_scatter_of_parts(parts, index))),
        }
        forward, backward = name.split("_")
        want = {}
        for half, kind in ((forward, "activation"), (backward, "activation-gradient")):
            if half in cost:
                op, flow = cost[half]
                want[Flow("y", kind, op)] = flow
        assert metered == want


@pytest.mark.parametrize("size", SIZES)
def test_identity_and_sum_check_against_differences(size: int) -> None:
    def body(axis: wire.Axis) -> bool:
        def fan(x: Tensor) -> Tensor:
            return ops.sum_identity((ops.identity_sum(x, axis) * (axis.index + 2)).cos(), axis)

        return torch.autograd.gradcheck(fan, (draw(3, 4).requires_grad_(),))

    assert on(size, body) == [True] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_norm_of_cut_features_needs_sum_and_sum(size: int) -> None:
    def body(axis: wire.Axis) -> bool:
        def norm(x: Tensor) -> Tensor:
            mine = ops.cut_gather(x, axis)
            square = ops.sum_sum(mine.square().sum(-1, keepdim=True), axis)
            return ops.gather_cut(mine * torch.rsqrt(square / x.shape[-1] + 1e-5), axis)

        x = draw(2, 12).requires_grad_()
        whole = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        assert torch.allclose(norm(x), whole, rtol=1e-12)
        return torch.autograd.gradcheck(norm, (x,))

    assert on(size, body) == [True] * size


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


def every_pair(x: Tensor, axis: wire.Axis) -> Tensor:
    x = ops.cut_gather(ops.identity_sum(x, axis).sin(), axis)
    x = ops.gather_cut(x * 2, axis, "embedding")
    x = ops.scatter_gather(ops.gather_scatter(x, axis, dim=0), axis, sizes=(3, 1))
    return ops.sum_sum(ops.sum_identity(x.sum(), axis), axis)


def test_compiled_without_a_graph_break_the_numbers_are_the_same_and_bytes_count_once_a_run() -> None:
    compiled = torch.compile(every_pair, backend="aot_eager", fullgraph=True)

    def body(axis: wire.Axis) -> None:
        results = []
        for step, function in enumerate((every_pair, compiled, compiled)):
            axis.ledger.begin(step)
            x = draw(3, 4).requires_grad_()
            function(x, axis).backward()
            results.append(x.grad)
        eager, first, second = results
        assert torch.equal(eager, first) and torch.equal(eager, second)
        assert axis.ledger.traffic(0) == axis.ledger.traffic(1) == axis.ledger.traffic(2)
        # 12 doubles on two ranks. Forward gathers 6, then all 12 along the rows; scatters 24, of which 18 or 6 stay;
        # sums 1 twice. Backward sums 1; gathers 18 or 6; scatters 24, of which 12 stay; gathers 6; sums 12.
        stay = (18, 6)[axis.index] * 8
        metered = {key: (one.calls, one.bytes) for key, one in axis.ledger.traffic(2).items()}
        assert metered == {
            Flow("y", "embedding", "all_gather"): (1, 48),
            Flow("y", "activation", "all_gather"): (1, 96),
            Flow("y", "activation", "reduce_scatter"): (1, 192 - stay),
            Flow("y", "activation", "all_reduce"): (2, 8 + 8),
            Flow("y", "activation-gradient", "all_reduce"): (2, 96 + 8),
            Flow("y", "activation-gradient", "reduce_scatter"): (1, 96),
            Flow("y", "activation-gradient", "all_gather"): (2, 48 + stay),
        }

    try:
        on(2, body)
    finally:
        torch.compiler.reset()


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
