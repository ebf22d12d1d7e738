"""Cross-entropy over a cut vocabulary: F.cross_entropy's numbers and gradients, and the bytes that the formula says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fourfold import wire
from fourfold.ledger import Ledger
from fourfold.placement.tensor.vocabulary import (
    VocabularyError,
    sent,
    vocabulary_cross_entropy,
    vocabulary_logsumexp,
)
from fourfold.wire.dry import Dry

SIZES = {"one": [11], "even": [4, 4, 4], "uneven": [4, 4, 3], "lopsided": [1, 0, 7, 5]}
"""The last with a rank that holds nothing."""


def on(sizes: list[int], body: Callable[[wire.Axis], Any]) -> list[Any]:
    return wire.threads.launch(len(sizes), lambda w: body(wire.Mesh(w, {"y": len(sizes)})["y"]), timeout=60)


def drawn(tokens: int | tuple[int, ...], vocabulary: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (tokens,) if isinstance(tokens, int) else tokens
    logits = scale * torch.randn(*shape, vocabulary, dtype=torch.float64, generator=generator)
    return logits, torch.randint(vocabulary, shape, generator=generator)


def close(found: Tensor, expected: Tensor, epsilon: float = 1e-12) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= epsilon * expected.abs().max())


def both(
    sizes: list[int], logits: Tensor, targets: Tensor, **options: Any
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Loss and gradient of one process; of every rank. The loss is weighted by token if it is not reduced."""
    weights = torch.linspace(0.5, 2, targets.numel(), dtype=torch.float64).view(targets.shape)

    def backward(loss: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
        (loss * weights.to(loss.dtype) if loss.dim() else loss * 1.7).sum().backward()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    def rank(axis: wire.Axis) -> tuple[Tensor, Tensor]:
        mine = logits.split(sizes, -1)[axis.index].clone().requires_grad_()
        return backward(vocabulary_cross_entropy(mine, targets, axis, sizes=sizes, **options), mine)

    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf.flatten(0, -2), targets.flatten(), **options)
    expected = expected.view(targets.shape) if options.get("reduction") == "none" else expected
    return *backward(expected, leaf), on(sizes, rank)


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_are_those_of_one_process(case: str, reduction: str, smoothing: float):
    sizes = SIZES[case]
    logits, targets = drawn((2, 5), sum(sizes))
    targets[0, 1] = targets[1, 4] = -100
    loss, gradient, ranks = both(sizes, logits, targets, reduction=reduction, label_smoothing=smoothing)
    for found, _ in ranks:
        assert close(found, loss)
        assert torch.equal(found, ranks[0][0]), "one rank joins a token for all"
    assert close(torch.cat([part for _, part in ranks], -1), gradient)
    assert gradient[0, 1].abs().max() == 0


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_fewer_tokens_than_ranks_and_another_ignored_number(tokens: int):
    sizes = SIZES["uneven"]
    logits, targets = drawn(tokens, sum(sizes))
    loss, gradient, ranks = both(sizes, logits, targets, ignore_index=int(targets[0]), reduction="sum")
    assert all(close(found, loss) if loss else found == 0 for found, _ in ranks)
    assert torch.allclose(torch.cat([part for _, part in ranks], -1), gradient, rtol=0, atol=1e-14)


def test_no_token_that_counts_and_no_token_at_all():
    sizes = SIZES["uneven"]
    for targets in (torch.full((3,), -100), torch.zeros(0, dtype=torch.int64)):
        logits = torch.randn(len(targets), 11, dtype=torch.float64)
        loss, gradient, ranks = both(sizes, logits, targets, reduction="sum")
        assert loss == 0 and all(found == 0 for found, _ in ranks)
        assert torch.equal(torch.cat([part for _, part in ranks], -1), gradient)
        mean = both(sizes, logits, targets)
        assert mean[0].isnan() and all(found.isnan() for found, _ in mean[2])


def test_a_single_token_without_a_dim():
    sizes = SIZES["even"]
    logits, targets = drawn((), 12)
    ranks = on(sizes, lambda axis: vocabulary_cross_entropy(logits.split(sizes)[axis.index], targets, axis))
    assert all(close(found, F.cross_entropy(logits, targets)) for found in ranks)


def test_large_logits_and_those_that_are_minus_infinity():
    sizes = SIZES["uneven"]
    logits, targets = drawn(6, 11, scale=3e4)
    logits[:, :4] = -torch.inf
    targets = targets.clamp(min=4)
    loss, gradient, ranks = both(sizes, logits, targets)
    assert all(close(found, loss) for found, _ in ranks)
    assert torch.allclose(torch.cat([part for _, part in ranks], -1), gradient, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype, epsilon", [(torch.float32, 2e-7), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_narrow_logits(dtype: torch.dtype, epsilon: float):
    """Statistics in float32: the loss is as good as its type can say."""
    sizes = SIZES["uneven"]
    logits, targets = drawn(9, 11)
    logits = logits.to(dtype)
    loss, gradient, _ = both(sizes, logits.double(), targets)
    _, _, ranks = both(sizes, logits, targets)
    for found, part in ranks:
        assert found.dtype == part.dtype == dtype
        assert close(found.double(), loss, epsilon)
    found = torch.cat([part for _, part in ranks], -1).double()
    assert (found - gradient).abs().max() <= 4 * epsilon * gradient.abs().max()


def test_log_of_the_sum_of_exponentials():
    sizes = SIZES["uneven"]
    logits, _ = drawn((2, 3), 11)

    def rank(axis: wire.Axis) -> tuple[Tensor, Tensor]:
        mine = logits.split(sizes, -1)[axis.index].clone().requires_grad_()
        found = vocabulary_logsumexp(mine, axis, sizes=sizes)
        found.square().sum().backward()
        assert mine.grad is not None
        return found.detach(), mine.grad

    leaf = logits.clone().requires_grad_()
    expected = leaf.logsumexp(-1)
    expected.square().sum().backward()
    ranks = on(sizes, rank)
    assert all(close(found, expected.detach()) for found, _ in ranks)
    assert leaf.grad is not None and close(torch.cat([part for _, part in ranks], -1), leaf.grad)


def test_the_definition_written_out():
    sizes = SIZES["uneven"]
    logits, targets = drawn(4, 11)
    leaf = logits.clone().requires_grad_()
    losses = [-(leaf[i, targets[i]].exp() / leaf[i].exp().sum()).log() for i in range(4)]
    torch.stack(losses).sum().backward()
    _, _, ranks = both(sizes, logits, targets, reduction="sum")
    assert close(ranks[0][0], sum(losses).detach())  # type: ignore[union-attr]
    assert leaf.grad is not None and close(torch.cat([part for _, part in ranks], -1), 1.7 * leaf.grad)


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("sizes", [[6, 6], [4, 4, 4], [4, 4, 3]])
@pytest.mark.parametrize("tokens, dtype", [(12, torch.float64), (7, torch.float32), (12, torch.bfloat16)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bytes_are_the_formulas_and_backward_sends_none(
    sizes: list[int], tokens: int, dtype: torch.dtype, smoothing: float
):
    logits, targets = drawn(tokens, sum(sizes))

    def rank(axis: wire.Axis) -> int:
        mine = logits.to(dtype).split(sizes, -1)[axis.index].clone().requires_grad_()
        loss = vocabulary_cross_entropy(mine, targets, axis, sizes=sizes, label_smoothing=smoothing)
        forward = axis.ledger.sent()
        loss.backward()
        assert axis.ledger.sent() == axis.ledger.sent(axis="y", kind="activation") == forward
        return forward

    for index, found in enumerate(on(sizes, rank)):
        assert found == sent(tokens, len(sizes), index, dtype, smoothing=smoothing > 0)
    if tokens == 12:  # 2 (p − 1)/p · tokens · numbers · bytes: nothing depends on the vocabulary
        p, numbers, bytes_each = len(sizes), 3 if smoothing else 2, 8 if dtype == torch.float64 else 4
        assert sent(12, p, 0, dtype, smoothing=smoothing > 0) == 2 * (p - 1) * 12 * numbers * bytes_each // p


def test_a_dry_axis_counts_them_on_meta():
    ledger = Ledger(rank=1)
    axis = Dry("y", 3, 1, ledger)
    with torch.device("meta"):
        logits, targets = torch.empty(7, 4, requires_grad=True), torch.empty(7, dtype=torch.int64)
    loss = vocabulary_cross_entropy(logits, targets, axis, sizes=[4, 4, 3])
    loss.backward()
    assert loss.shape == () and logits.grad is not None and logits.grad.shape == (7, 4)
    assert ledger.sent() == sent(7, 3, 1, torch.float32)


# ---------------------------------------------------------------- the op


def test_the_op_is_registered_as_torch_wants_it():
    logits, targets = drawn(6, 12)

    def rank(axis: wire.Axis) -> None:
        mine = logits.split(4, -1)[axis.index].clone().requires_grad_()
        arguments = (mine, targets, axis.key, [4, 4, 4], True)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.fourfold.vocabulary.default, arguments, test_utils=checks)

    on([4, 4, 4], rank)


def test_compiled_it_is_one_graph_and_counts_once_a_run():
    torch._dynamo.reset()
    logits, targets = drawn(6, 12)
    axis = Dry("y", 3, 1)

    def loss(logits: Tensor) -> Tensor:
        return vocabulary_cross_entropy(logits * 2, targets, axis, label_smoothing=0.1)

    results = []
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        axis.ledger.begin(len(results))
        mine = logits[:, 4:8].clone().requires_grad_()
        found = call(mine)
        found.backward()
        results.append((found.detach(), mine.grad))
        assert axis.ledger.sent(len(results) - 1) == sent(6, 3, 1, torch.float64, smoothing=True)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], rtol=0, atol=1e-15)


def test_a_second_derivative_is_refused():
    """It would need the other ranks' sums; none is computed from a part of them."""
    axis = Dry("y", 2, 0)
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    loss = vocabulary_cross_entropy(logits, torch.zeros(3, dtype=torch.int64), axis)
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(VocabularyError, match="has first derivatives only"):
        gradient.square().sum().backward()


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize("target", [-1, 12])
def test_a_target_outside_of_the_vocabulary_is_named(target: int):
    def body(world: wire.World) -> None:
        axis = wire.Mesh(world, {"y": 3})["y"]
        with pytest.raises(VocabularyError, match=rf"expected targets from 0 to 11, found .*{target}.*ignore_index"):
            vocabulary_cross_entropy(torch.zeros(2, 4), torch.tensor([3, target]), axis)

    wire.threads.launch(3, body)


def test_where_a_device_is_not_waited_for_it_is_not_a_number():
    from fourfold.placement.tensor.vocabulary import _told

    told = _told(torch.zeros(4, 2), torch.tensor([0, -1, 11, 12]), 12)
    assert told[:, 1].isnan().tolist() == [False, True, False, True] and not told[:, 0].isnan().any()


@pytest.mark.parametrize(
    "shape, options, match",
    [
        ((3,), {}, r"expected targets of the shape of the logits \(2, 4\) without their last dim, found \(3,\)"),
        ((2,), {"reduction": "max"}, "expected reduction none, mean or sum, found 'max'"),
        ((2,), {"sizes": [4, 4]}, r"expected `sizes` of 3 parts, 4 of them on rank 0, found \[4, 4\]"),
        ((2,), {"sizes": [3, 4, 4]}, r"expected `sizes` of 3 parts, 4 of them on rank 0, found \[3, 4, 4\]"),
    ],
)
def test_bad_input_is_named(shape: tuple[int, ...], options: dict[str, Any], match: str):
    with pytest.raises(VocabularyError, match=match):
        vocabulary_cross_entropy(torch.zeros(2, 4), torch.zeros(shape, dtype=torch.int64), Dry("y", 3, 0), **options)
