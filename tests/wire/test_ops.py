"""The conjugate pairs: cut networks have the gradients of whole ones, compiled or not; bytes count once a run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fourfold import wire
from fourfold.ledger import Flow
from fourfold.wire import ops

SIZES = (1, 2, 3, 4)


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


def test_a_dim_that_does_not_divide_is_refused() -> None:
    def body(axis: wire.Axis) -> None:
        with pytest.raises(wire.UsageError, match=r"dim -1 of a tensor of shape \(2, 5\) does not divide by 2 ranks"):
            ops.cut_gather(draw(2, 5), axis)

    on(2, body)


def every_pair(x: Tensor, axis: wire.Axis) -> Tensor:
    x = ops.cut_gather(ops.identity_sum(x, axis).sin(), axis)
    x = ops.gather_cut(x * 2, axis, "embedding")
    return ops.sum_sum(ops.sum_identity(x, axis).sum(), axis)


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
        # 12 doubles on two ranks: forward gathers 6 and sums 12 + 1; backward gathers 6 and sums 1 + 12.
        metered = {key: (one.calls, one.bytes) for key, one in axis.ledger.traffic(2).items()}
        assert metered == {
            Flow("y", "embedding", "all_gather"): (1, 48),
            Flow("y", "activation", "all_reduce"): (2, 96 + 8),
            Flow("y", "activation-gradient", "all_reduce"): (2, 96 + 8),
            Flow("y", "activation-gradient", "all_gather"): (1, 48),
        }

    try:
        on(2, body)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("name", ["sum_identity", "sum_sum", "gather_cut", "cut_gather"])
def test_registration_passes_torch_own_checks(name: str) -> None:
    def body(axis: wire.Axis) -> None:
        more = (-1,) if name in ("gather_cut", "cut_gather") else ()
        op = getattr(torch.ops.fourfold, name).default
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op, (draw(2, 4).requires_grad_(), axis.key, "activation", *more), test_utils=tests)

    on(1, body)
