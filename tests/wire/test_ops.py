"""The conjugate pairs: cut networks have the gradients of whole ones, compiled or not; bytes count once a run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fourfold import wire
from fourfold.ledger import Flow
from fourfold.wire import formulas, ops
from fourfold.wire.errors import UsageError

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


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("dims", [(0, -1), (-1, 0), (1, 2)])
def test_a_trade_moves_every_element_once_and_its_backward_moves_it_back(size: int, dims: tuple[int, int]) -> None:
    """From a part of one dim to a part of another, both uneven; bytes are those of the all-to-all."""
    cuts, joins, (cut, joined) = UNEVEN[size], UNEVEN[size][::-1], dims
    shape = [2, 2, 2]
    shape[cut], shape[joined] = sum(cuts), sum(joins)
    whole = draw(*shape)

    def body(axis: wire.Axis) -> None:
        mine = whole.split(list(joins), joined)[axis.index].clone().requires_grad_()
        found = ops.trade(mine, axis, cut=cut, joined=joined, cuts=cuts, joins=joins)
        assert torch.equal(found, whole.split(list(cuts), cut)[axis.index])
        row = mine.numel() // sum(cuts) * 8
        sent = {Flow("y", "activation", "all_to_all"): formulas.all_to_all([row * n for n in cuts], axis.index)}
        assert {flow: one.bytes for flow, one in axis.ledger.traffic().items()} == sent
        (found * whole.cos().split(list(cuts), cut)[axis.index]).sum().backward()
        assert mine.grad is not None
        assert torch.equal(mine.grad, whole.cos().split(list(joins), joined)[axis.index])
        row = found.numel() // sum(joins) * 8
        sent[Flow("y", "activation-gradient", "all_to_all")] = formulas.all_to_all([row * n for n in joins], axis.index)
        assert {flow: one.bytes for flow, one in axis.ledger.traffic().items()} == sent

    on(size, body)


def test_a_trade_checks_its_sizes() -> None:
    def body(axis: wire.Axis) -> None:
        x = draw(4, 3)
        for about in (
            {"cut": 0, "joined": 0, "cuts": (2, 2), "joins": (4, 4)},
            {"cut": 0, "joined": 1, "cuts": (2, 1), "joins": (3, 3)},
            {"cut": 0, "joined": 1, "cuts": (2, 2), "joins": (2, 3) if axis.index == 0 else (3, 2)},
        ):
            with pytest.raises(UsageError):
                ops.trade(x, axis, **about)  # pyright: ignore[reportArgumentType]

    on(2, body)


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
