"""Losses that people write, on logits of which each rank holds a part: one process's numbers, and what crosses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fourfold import wire
from fourfold.placement.tensor.logits import SplitLogits
from fourfold.placement.tensor.vocabulary import VocabularyError, sent
from fourfold.randomness import Position, at, inside
from fourfold.wire import formulas
from fourfold.wire.dry import Dry

SIZES = (4, 3, 4)
ROWS, TIME, VOCABULARY = 2, 5, sum(SIZES)
TOKENS = ROWS * TIME

Loss = Callable[[Tensor, Tensor], Tensor]


def drawn() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(VOCABULARY, (ROWS, TIME), generator=generator)
    targets[1, 2] = -100
    return 2 * torch.randn(ROWS, TIME, VOCABULARY, dtype=torch.float64, generator=generator), targets


def on(body: Callable[[wire.Axis], Any]) -> list[Any]:
    return wire.threads.launch(len(SIZES), lambda world: body(wire.Mesh(world, {"y": len(SIZES)})["y"]), timeout=60)


def close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= 1e-12 * expected.abs().max())


def compare(loss: Loss) -> list[int]:
    """Loss and gradient are those of one process; the bytes that each rank sent."""
    logits, targets = drawn()
    leaf = logits.clone().requires_grad_()
    expected = loss(leaf * 1.5, targets)
    expected.backward()

    def rank(axis: wire.Axis) -> tuple[Tensor, Tensor | None, int]:
        mine = logits.split(SIZES, -1)[axis.index].clone().requires_grad_()
        mode = SplitLogits()
        with mode:
            with mode.paused():
                output = mine * 1.5
                assert output.shape == mine.shape
            mode.mark(output, axis, SIZES)
            found = loss(output, targets)
        forward = axis.ledger.sent()
        found.backward()
        assert axis.ledger.sent() == forward, "backward sends nothing"
        return found.detach(), mine.grad, forward

    ranks = on(rank)
    assert leaf.grad is not None
    for found, part, _ in ranks:
        assert close(found, expected.detach()) and part is not None
    assert close(torch.cat([part for _, part, _ in ranks], -1), leaf.grad)
    return [nbytes for *_, nbytes in ranks]


def cheap(tokens: int = TOKENS, *, smoothing: bool = False) -> list[int]:
    return [sent(tokens, len(SIZES), index, torch.float64, smoothing=smoothing) for index in range(len(SIZES))]


def gathered(tokens: int = TOKENS, itemsize: int = 8) -> list[int]:
    parts = [tokens * size * itemsize for size in SIZES]
    return [formulas.all_gather_of_parts(parts, index) for index in range(len(SIZES))]


def both(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]


def flat(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


CHEAP: dict[str, Loss] = {
    "flatten": flat,
    "view by size": lambda x, t: F.cross_entropy(x.view(-1, x.size(-1)), t.view(-1)),
    "view by shape": lambda x, t: F.cross_entropy(x.view(-1, x.shape[-1]), t.view(-1)),
    "view by a constant": lambda x, t: F.cross_entropy(x.contiguous().view(-1, VOCABULARY), t.view(-1)),
    "reshape by numbers": lambda x, t: F.cross_entropy(torch.reshape(x, (x.numel() // x.size(-1), -1)), t.reshape(-1)),
    "classes second": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "classes second, permuted": lambda x, t: F.cross_entropy(x.permute(0, 2, 1), t),
    "module": lambda x, t: nn.CrossEntropyLoss(reduction="sum")(x.flatten(0, 1), t.flatten()),
    "in float": lambda x, t: F.cross_entropy(x.to(torch.float64).flatten(0, 1), t.flatten(), reduction="sum"),
    "token by token": lambda x, t: (flat(x, t, reduction="none") ** 2).sum(),
    "negative log-likelihood": lambda x, t: F.nll_loss(F.log_softmax(x, -1).flatten(0, -2), t.flatten()),
    "its modules": lambda x, t: nn.NLLLoss()(nn.LogSoftmax(2)(x).view(-1, x.size(2)), t.flatten()),
    "classes second in it": lambda x, t: (
        F.nll_loss(x.mT.contiguous().log_softmax(1), t) if False else F.nll_loss(F.log_softmax(x.mT, 1), t)
    ),
    "a mask": lambda x, t: F.cross_entropy(x[t != -100], t[t != -100]),
}


@pytest.mark.parametrize("case", CHEAP)
def test_the_usual_losses_send_statistics_only(case: str):
    assert compare(CHEAP[case]) == cheap(TOKENS - 1 if case == "a mask" else TOKENS)


def test_shifted_by_one_token():
    """`output.logits[:, :-1].float()` beside `tokens[:, 1:]`."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        shifted = logits[:, :-1].double()
        return flat(shifted, targets[:, 1:]) + flat(logits[..., :-1, :].contiguous(), targets[..., 1:])

    each = cheap(ROWS * (TIME - 1))
    assert compare(loss) == both(each, each)


def test_the_loss_of_transformers():
    from transformers.loss.loss_utils import ForCausalLMLoss

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return ForCausalLMLoss(logits, targets, vocab_size=VOCABULARY)

    logits, targets = drawn()
    expected = loss(logits, targets)

    def rank(axis: wire.Axis) -> tuple[Tensor, int]:
        part, mode = logits.split(SIZES, -1)[axis.index], SplitLogits()
        mode.mark(part, axis, SIZES)
        with mode:
            return loss(part, targets), axis.ledger.sent()

    for index, (found, nbytes) in enumerate(on(rank)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)  # it computes in float32
        assert nbytes == sent(TOKENS, len(SIZES), index, torch.float32)


def test_smoothing_and_parts_of_the_time():
    assert compare(lambda x, t: flat(x, t, label_smoothing=0.1)) == cheap(smoothing=True)
    pieces = cheap(ROWS * 2), cheap(ROWS * 2), cheap(ROWS)
    chunked = compare(
        lambda x, t: torch.stack(
            [flat(a, b, reduction="sum") for a, b in zip(x.split(2, 1), t.split(2, 1), strict=True)]
        ).sum()
    )
    assert chunked == [sum(three) for three in zip(*pieces, strict=True)]


def test_a_penalty_of_large_logits():
    assert compare(lambda x, t: flat(x, t) + 0.1 * x.logsumexp(-1).square().mean()) == both(cheap(), cheap())
    assert compare(lambda x, t: torch.logsumexp(x, 2, True).square().sum()) == cheap()


WHOLE: dict[str, Loss] = {
    "class weights": lambda x, t: flat(x, t, weight=torch.linspace(0.5, 2, VOCABULARY, dtype=torch.float64)),
    "soft targets": lambda x, t: F.cross_entropy(x.flatten(0, 1), x.detach().flatten(0, 1).softmax(-1).clone()),
    "by hand": lambda x, t: -x.softmax(-1).gather(-1, t.clamp(min=0)[..., None]).log().mean(),
    "log-softmax and gather": lambda x, t: -F.log_softmax(x, -1).gather(-1, t.clamp(min=0)[..., None]).sum(),
    "one class": lambda x, t: x[..., 3].square().sum(),
    "every second class": lambda x, t: x[:, :, ::2].square().sum(),
    "another dim": lambda x, t: x.logsumexp(1).sum(),
    "divergence": lambda x, t: F.kl_div(x.log_softmax(-1), torch.full_like(x, 1 / VOCABULARY), reduction="sum"),
    "a list": lambda x, t: torch.stack([x, x]).square().sum(),
    "flat": lambda x, t: x.flatten().square().sum() + x.view(-1)[3],
    "a new last dim": lambda x, t: x[..., None].square().sum(),
    "product": lambda x, t: (x @ torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64)).square().sum(),
    "loop": lambda x, t: torch.stack([flat(row, one) for row, one in zip(x, t, strict=True)]).sum(),
    "norm of the whole": lambda x, t: torch.linalg.vector_norm(x) / len(x),
}


@pytest.mark.parametrize("case", WHOLE)
def test_everything_else_gets_the_whole_gathered(case: str):
    found = compare(WHOLE[case])
    times = 2 if case in ("soft targets", "divergence") else 1  # of two tensors each
    assert found == [times * nbytes for nbytes in gathered()]


def test_one_tensor_is_gathered_once_and_a_metric_without_gradients_may_come_first():
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            right = (logits.argmax(-1) == targets).sum()
        assert right >= 0 and not right.requires_grad
        return logits.softmax(-1).square().sum() + (logits - 1).square().sum()

    assert compare(loss) == gathered()


def test_a_metric_beside_the_usual_loss():
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        (logits.detach().argmax(-1) == targets).float().mean()
        return flat(logits, targets)

    assert compare(loss) == both(gathered(), cheap())


def test_what_a_loss_reads_of_logits_is_that_of_the_whole():
    logits, _ = drawn()

    def rank(axis: wire.Axis) -> None:
        part, mode = logits.split(SIZES, -1)[axis.index].clone().requires_grad_(), SplitLogits()
        mode.mark(part, axis, SIZES)
        with mode:
            assert part.shape == part.size() == logits.shape and part.size(-1) == part.shape[-1] == VOCABULARY
            assert part.numel() == part.nelement() == torch.numel(part) == logits.numel() and len(part) == ROWS
            assert part[0, 0].shape == (VOCABULARY,) and part[:, None, -1].shape == (ROWS, 1, VOCABULARY)
            assert part[torch.tensor([0, 1, 1])].shape == (3, TIME, VOCABULARY)
            assert part.transpose(0, 2).shape == (VOCABULARY, TIME, ROWS) and part.mT.shape[1] == VOCABULARY
            assert part.unflatten(1, (5, 1)).squeeze(2).shape == part.shape
            assert [chunk.shape for chunk in part.chunk(2, dim=1)] == [(2, 3, VOCABULARY), (2, 2, VOCABULARY)]
            assert (part.dtype, part.dim(), part.ndim, part.device.type) == (torch.float64, 3, 3, "cpu")
            assert part.requires_grad and part.is_floating_point() and part.element_size() == 8
            assert F.log_softmax(part, -1).shape == part.bfloat16().float().shape == logits.shape
            assert axis.ledger.sent() == 0
            assert torch.equal(torch.tensor(part.tolist(), dtype=torch.float64), logits)
            assert torch.equal(F.log_softmax(part, -1)[0].exp(), logits[0].log_softmax(-1).exp())
        assert part.shape[-1] == SIZES[axis.index]

    on(rank)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_logits_taken_to_float(dtype: torch.dtype):
    logits, targets = drawn()
    expected = flat(logits.to(dtype).float(), targets)

    def rank(axis: wire.Axis) -> Tensor:
        part, mode = logits.to(dtype).split(SIZES, -1)[axis.index], SplitLogits()
        mode.mark(part, axis, SIZES)
        with mode:
            return flat(part.float(), targets)

    for found in on(rank):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


# ---------------------------------------------------------------- changes in place, hooks


def _suppressed(logits: Tensor, targets: Tensor) -> Tensor:
    logits[..., 3] = -5.0
    return flat(logits, targets)


def _tempered(logits: Tensor, targets: Tensor) -> Tensor:
    logits /= 2
    return flat(logits, targets) + logits.square().sum()


def _through_a_view_of_the_whole(logits: Tensor, targets: Tensor) -> Tensor:
    logits.select(1, 0).mul_(3)
    return flat(logits, targets)


def _hooked(logits: Tensor, targets: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: gradient * 7)
    return flat(logits, targets)


@pytest.mark.parametrize("loss", [_suppressed, _tempered, _through_a_view_of_the_whole, _hooked])
def test_logits_changed_in_place_or_watched_are_whole_from_there_on(loss: Loss):
    assert compare(loss) == gathered()


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x.register_hook(lambda g: g * 2)])
def test_changing_them_while_a_view_is_in_use_is_refused(change: Callable[[Tensor], Any]):
    mode, axis = SplitLogits(), Dry("y", 2, 0)
    logits = torch.randn(2, 3, 4, requires_grad=True) * 1
    mode.mark(logits, axis)
    with mode:
        view = logits[:, :-1]
        with pytest.raises(VocabularyError, match=r"of shape \(2, 3, 8\) are changed .* view .*\(2, 2, 8\).*axis y"):
            change(logits)
        assert view.shape == (2, 2, 8)


def test_a_copy_is_no_view():
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        copy, likelihoods = logits.clone(), F.log_softmax(logits, -1)
        logits.mul_(0)
        return flat(copy, targets) + F.nll_loss(likelihoods.flatten(0, 1), targets.flatten()) + logits.sum()

    assert compare(loss) == both(gathered(), both(cheap(), cheap()))


# ---------------------------------------------------------------- the mode itself


def test_dropout_in_a_loss_still_draws_from_the_streams():
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return flat(F.dropout(logits, 0.3), targets)

    logits, targets = drawn()
    with at(Position(1, 0, 0, ROWS)), inside(nn.Module(), ""):
        expected = loss(logits, targets)

    def rank(axis: wire.Axis) -> Tensor:
        part, mode = logits.split(SIZES, -1)[axis.index], SplitLogits()
        mode.mark(part, axis, SIZES)
        with at(Position(1, 0, 0, ROWS)), inside(nn.Module(), ""), mode:
            return loss(part, targets)

    assert all(close(found, expected) for found in on(rank))


def test_a_gradient_of_the_parts_that_a_loss_asks_for_itself_is_refused_by_torch():
    mode, logits = SplitLogits(), torch.randn(6, 4, requires_grad=True) * 1
    mode.mark(logits, Dry("y", 2, 0))
    with mode:
        loss = F.cross_entropy(logits, torch.zeros(6, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(loss, logits)


def test_an_axis_of_one_rank_and_a_paused_mode_see_nothing():
    mode, logits = SplitLogits(), torch.randn(2, 3, 4)
    mode.mark(logits, Dry("y", 1, 0))
    with mode:
        assert logits.shape == (2, 3, 4)
    mode.mark(logits, Dry("y", 2, 0))
    with mode:
        assert logits.shape == (2, 3, 8)
        with mode.paused():
            assert logits.shape == (2, 3, 4)
        assert logits.shape == (2, 3, 8)


def test_marks_live_no_longer_than_their_tensors():
    mode = SplitLogits()
    logits = torch.randn(2, 3, 4)
    mode.mark(logits, Dry("y", 2, 0))
    with mode:
        logits[:, 1:].float().flatten(0, 1)
    gc.collect()
    assert len(mode._marks) == 1
    del logits
    gc.collect()
    assert len(mode._marks) == 0


@pytest.mark.parametrize("sizes", [(4, 4, 4), (3, 5)])
def test_sizes_that_are_not_the_parts_are_named(sizes: tuple[int, ...]):
    with pytest.raises(VocabularyError, match=r"expected 2 sizes, 4 on rank 0.*found \["):
        SplitLogits().mark(torch.zeros(2, 4), Dry("y", 2, 0), sizes)


def test_torchs_own_words_about_a_wrong_call():
    mode, logits = SplitLogits(), torch.randn(6, 4)
    mode.mark(logits, Dry("y", 2, 0))
    with mode:
        with pytest.raises(ValueError, match="batch_size"):
            F.cross_entropy(logits, torch.zeros(5, dtype=torch.int64))
        with pytest.raises(ValueError, match="max is not a valid value for reduction"):
            F.cross_entropy(logits, torch.zeros(6, dtype=torch.int64), reduction="max")
