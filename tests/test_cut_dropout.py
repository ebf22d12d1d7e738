"""Dropout on a tensor grid: the mask of a part is that part of the mask which one process draws."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from math import prod

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold import torch_private
from fourfold.randomness import Cut, Layout, Position, RandomnessError, at, bits, capture, cut, dropout, inside
from fourfold.randomness.cut import Part

FIRST = Layout(0, "slowest")


def mask(shape: tuple[int, ...], position: Position, p: float = 0.4) -> Tensor:
    with at(position), warnings.catch_warnings():
        warnings.simplefilter("error")
        return torch.ops.fourfold.dropout(torch.ones(shape), p, "s")[1]


def part_of(whole: Tensor, layout: Layout, rows: int, cuts: tuple[Cut, ...]) -> Tensor:
    """By index, dim by dim: in the dim of the rows a cut is of every row's share."""
    for one in cuts:
        index = torch.tensor([i for run in one.runs for i in run], dtype=torch.int64)
        if one.dim != layout.dim or layout.order not in ("slowest", "fastest"):
            whole = whole.index_select(one.dim, index)
            continue
        shape = (rows, one.size) if layout.order == "slowest" else (one.size, rows)
        split = whole.unflatten(one.dim, shape)
        whole = split.index_select(one.dim + (layout.order == "slowest"), index).flatten(one.dim, one.dim + 1)
    return whole


CASES: dict[str, tuple[Layout, tuple[int, ...], tuple[tuple[Cut, ...], ...]]] = {
    "features over x": (FIRST, (3, 5, 12), ((Cut(2, (range(6),), 12),), (Cut(2, (range(6, 12),), 12),))),
    "uneven, one rank with nothing": (
        FIRST,
        (3, 5, 12),
        (
            (Cut(2, (range(7),), 12),),
            (Cut(2, (range(7, 12),), 12),),
            (Cut(2, (), 12),),
            (Cut(2, (range(3, 3),), 12),),
        ),
    ),
    "heads over y": (FIRST, (3, 4, 6, 6), ((Cut(1, (range(1),), 4),), (Cut(1, (range(1, 4),), 4),))),
    "the sequence form": (FIRST, (3, 8, 5), ((Cut(1, (range(4),), 8),), (Cut(1, (range(4, 8),), 8),))),
    "packed": (
        FIRST,
        (3, 2, 12),
        ((Cut(2, (range(2), range(4, 6), range(8, 10)), 12),), (Cut(2, (range(2, 4), range(10, 12)), 12),)),
    ),
    "in another order": (FIRST, (3, 2, 12), ((Cut(2, (range(9, 12), range(2)), 12),),)),
    "two dims": (FIRST, (3, 8, 12), ((Cut(1, (range(2, 5),), 8), Cut(2, (range(1), range(5, 12)), 12)),)),
    "three dims": (
        FIRST,
        (3, 4, 6, 5),
        ((Cut(1, (range(1, 3),), 4), Cut(3, (range(4),), 5), Cut(2, (range(2), range(3, 6)), 6)),),
    ),
    "rows × heads": (FIRST, (3 * 4, 6, 6), ((Cut(0, (range(1, 3),), 4),), (Cut(0, (range(1), range(3, 4)), 4),))),
    "time first": (Layout(1, "slowest"), (5, 3, 12), ((Cut(2, (range(4, 12),), 12), Cut(0, (range(1, 4),), 5)),)),
    "time × rows": (Layout(0, "fastest"), (5 * 3, 12), ((Cut(1, (range(5),), 12), Cut(0, (range(2, 5),), 5)),)),
    "without rows": (Layout(0, "shared"), (6, 12), ((Cut(0, (range(2, 4),), 6), Cut(1, (range(1, 5),), 12)),)),
    "apart": (Layout(0, "apart"), (6, 12), ((Cut(1, (range(1, 5),), 12),),)),
}


@pytest.fixture(params=["as it is", "all alone", "all sliced", "tiny chunks"])
def regime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    seek, chunk = {
        "as it is": (cut.SEEK, cut.CHUNK),
        "all alone": (-1, cut.CHUNK),
        "all sliced": (1 << 40, 1 << 40),
        "tiny chunks": (1 << 40, 30),
    }[request.param]
    monkeypatch.setattr(cut, "SEEK", seek)
    monkeypatch.setattr(cut, "CHUNK", chunk)


@pytest.mark.usefixtures("regime")
@pytest.mark.parametrize("case", CASES)
def test_the_mask_of_a_part_is_that_part_of_the_mask(case: str):
    layout, shape, ranks = CASES[case]
    position = Position(9, 2, 4, 3, {"s": layout})
    whole = mask(shape, position)
    for cuts in ranks:
        expected = part_of(whole, layout, 3, cuts)
        assert torch.equal(mask(tuple(expected.shape), position._replace(cuts={"s": cuts})), expected)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...], int, int, tuple[Cut, ...]]:
    dims, rows = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    box = [draw(st.integers(1, 6)) for _ in range(dims)]
    layout = Layout(draw(st.integers(0, dims - 1)), draw(st.sampled_from(["slowest", "fastest"])))
    cuts = []
    for dim in draw(st.lists(st.integers(0, dims - 1), unique=True, max_size=dims)):
        bounds = sorted(
            draw(st.lists(st.integers(0, box[dim]), min_size=2, max_size=6).filter(lambda b: len(b) % 2 == 0))
        )
        runs = [range(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]
        cuts.append(Cut(dim, tuple(draw(st.permutations(runs))), box[dim]))
    shape = tuple(size * rows if dim == layout.dim else size for dim, size in enumerate(box))
    return layout, shape, rows, draw(st.integers(0, 9)), tuple(cuts)


@settings(max_examples=120, deadline=None)
@given(cut_tensors(), st.sampled_from([-1, 3, 16_000]), st.sampled_from([1, 9, 1 << 18]))
def test_any_cut_of_any_dims(drawn: tuple, seek: int, chunk: int):
    layout, shape, rows, row, cuts = drawn
    position = Position(9, 2, row, rows, {"s": layout})
    expected = part_of(mask(shape, position), layout, rows, cuts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "SEEK", seek)
        patch.setattr(cut, "CHUNK", chunk)
        assert torch.equal(mask(tuple(expected.shape), position._replace(cuts={"s": cuts})), expected)


# ---------------------------------------------------------------- how much is drawn


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of lanes of every call."""
    calls: list[int] = []

    def counting(seed: int, site: str, step: int, start: int, count: int) -> np.ndarray:
        calls.append(count)
        return bits(seed, site, step, start, count)

    monkeypatch.setattr(import_module("fourfold.randomness.dropout"), "bits", counting)
    return calls


def test_long_runs_draw_what_is_held_and_nothing_else(drawn: list[int]):
    """A quarter of 8 heads with 128 × 128 weights each: 2 · 128² of the row's 8 · 128² lanes, in one piece."""
    mask((2, 2, 128, 128), Position(1, 0, 0, 2, cuts={"s": (Cut(1, (range(2, 4),), 8),)}))
    assert drawn == [2 * 128 * 128] * 2


def test_short_runs_draw_whole_rows_in_bounded_chunks(drawn: list[int]):
    """Half of 768 features: what lies between two runs costs less than going around it."""
    mask((2, 400, 384), Position(1, 0, 0, 2, cuts={"s": (Cut(2, (range(384, 768),), 768),)}))
    assert sum(drawn) == 2 * 400 * 768 and max(drawn) <= cut.CHUNK
    assert len(drawn) == -(-2 * 400 * 768 // (cut.CHUNK // 768 * 768))


def test_a_long_run_of_short_ones_draws_within_the_long_one(drawn: list[int]):
    """Heads over y and keys over another axis: whole heads are passed over, keys are sliced."""
    cuts = (Cut(1, (range(6, 8),), 8), Cut(3, (range(64),), 128))
    mask((1, 2, 128, 64), Position(1, 0, 0, 1, cuts={"s": cuts}))
    assert drawn == [2 * 128 * 128]


@pytest.mark.parametrize("cuts", [{}, {"other": (Cut(1, (range(2),), 4),)}])
def test_a_site_without_cuts_does_no_more_than_before(
    drawn: list[int], monkeypatch: pytest.MonkeyPatch, cuts: dict[str, tuple[Cut, ...]]
):
    def never(*_: object) -> None:
        raise AssertionError("a part was made of a tensor that is not cut")

    monkeypatch.setattr(Part, "of", never)
    mask((4, 7, 12), Position(1, 0, 0, 4, cuts=cuts))
    assert drawn == [4 * 7 * 12]


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize("shape", [(2, 5, 12), (2, 5, 5), (2, 5, 0)])
def test_a_tensor_of_another_extent_is_drawn_apart_and_said(shape: tuple[int, ...]):
    def found(x: int, row: int) -> Tensor:
        cuts = {"s": (Cut(2, (range(6 * x, 6 * x + 6),), 12),)}
        with at(Position(1, 0, row, 2, cuts=cuts)), pytest.warns(UserWarning, match=r"not exact: dropout at 's'.*part"):
            return torch.ops.fourfold.dropout(torch.ones(shape), 0.5, "s")[1]

    assert found(0, 0).shape == shape
    assert torch.equal(found(0, 0), found(1, 0)), "should the tensor be whole, then all ranks keep it equal"
    assert shape[2] == 0 or not torch.equal(found(0, 0), found(0, 2))


@pytest.mark.parametrize(
    "dim, runs, size",
    [(-1, (range(2),), 4), (1, (range(3, 5),), 4), (1, (range(0, 4, 2),), 4), (1, (range(3, 1),), 4)],
)
def test_a_cut_that_cannot_be_is_refused(dim: int, runs: tuple[range, ...], size: int):
    with pytest.raises(RandomnessError, match=f"expected a dim from 0 and runs of step 1 within 0 … {size}"):
        Cut(dim, runs, size)


# ---------------------------------------------------------------- the kernel of CUDA, its semantics


def test_the_cuda_path_draws_whole_rows_and_slices(monkeypatch: pytest.MonkeyPatch):
    """With a stand-in for the generator, which exists on CUDA and meta only: a stream a key."""

    def uniform(keys: Tensor, out: Tensor) -> None:
        for key, row in zip(keys.flatten(1)[:, 0].tolist(), out, strict=True):
            row.copy_(torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).random(row.numel())))

    monkeypatch.setattr(torch_private, "has_stateless_uniform", lambda: True)
    monkeypatch.setattr(torch_private, "stateless_uniform", uniform)
    for layout, shape, ranks in CASES.values():
        position = Position(9, 2, 4, 3, {"s": layout})
        with at(position):
            whole = mask_on_cuda(torch.ones(shape))
        for cuts in ranks:
            expected = part_of(whole, layout, 3, cuts)
            with at(position._replace(cuts={"s": cuts})):
                assert torch.equal(mask_on_cuda(torch.ones(expected.shape)), expected)


def mask_on_cuda(x: Tensor) -> Tensor:
    from fourfold.randomness.dropout import _keep_cuda

    return _keep_cuda(x, 0.4, "s")


def test_the_cuda_paths_calls_and_shapes_on_meta():
    with at(Position(1, 0, 0, 4, cuts={"s": (Cut(2, (range(2), range(5, 6)), 6),)})):
        keep = mask_on_cuda(torch.empty(4, 5, 3, device="meta"))
    assert keep.shape == (4, 5, 3) and keep.dtype == torch.bool


# ---------------------------------------------------------------- through stock code

HEADS, FEATURES = Cut(1, (range(1, 3),), 4), Cut(2, (range(2, 7),), 8)


def stock(call: Callable[[Tensor], Tensor], x: Tensor, cuts: tuple[Cut, ...] = ()) -> Tensor:
    with at(Position(3, 1, 2, len(x), cuts={"h#0": cuts})), inside(nn.Module(), "h"), warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(x)


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Cut, ...]]] = {
    "dropout": (lambda x: F.dropout(x, 0.4), (HEADS, FEATURES)),
    "dropout, in place": (lambda x: F.dropout(x, 0.4, inplace=True), (FEATURES,)),
    "channels": (lambda x: F.dropout1d(x, 0.4), (HEADS,)),
    "channels of cut features": (lambda x: F.dropout1d(x, 0.4), (FEATURES,)),
    "channels of images": (lambda x: F.dropout2d(x.unflatten(2, (-1, 1)), 0.4).flatten(2), (HEADS, FEATURES)),
    "alpha": (lambda x: F.alpha_dropout(x, 0.4, training=True), (HEADS, FEATURES)),
    "alpha of channels": (lambda x: F.feature_alpha_dropout(x, 0.4, training=True), (HEADS, FEATURES)),
}


@pytest.mark.parametrize("case", CALLS)
def test_every_dropout_of_torch_follows_the_cuts(case: str):
    call, cuts = CALLS[case]
    x = torch.randn(3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = part_of(stock(call, x.clone()), FIRST, 3, cuts)
    assert torch.equal(stock(call, part_of(x, FIRST, 3, cuts), cuts), whole)
    assert not torch.equal(whole, part_of(x, FIRST, 3, cuts))


def test_the_weights_of_attention_follow_the_heads():
    """(rows, heads, time, features): a rank has heads 1 and 2 of 4; its keys are repeated from one group of two."""
    x = torch.randn(3, 4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True)

    whole = stock(attention, x)
    assert not torch.allclose(whole, attention(x).nan_to_num())
    assert torch.allclose(stock(attention, x[:, 1:3], (HEADS,)), whole[:, 1:3], rtol=0, atol=1e-15)


def test_between_recurrent_layers():
    gru = nn.GRU(4, 8, num_layers=2, dropout=0.5, batch_first=True, dtype=torch.float64).train()
    first, second = (nn.GRU(4 if i == 0 else 8, 8, batch_first=True, dtype=torch.float64) for i in range(2))
    for i, single in enumerate((first, second)):
        mine = ((key, value) for key, value in gru.state_dict().items() if key.endswith(f"_l{i}"))
        single.load_state_dict({f"{key[:-1]}0": value for key, value in mine})
    x = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = stock(lambda x: gru(x)[0], x)
    part = stock(lambda x: F.dropout(first(x)[0][..., 2:7], 0.5), x, (FEATURES,))
    dropped = stock(lambda x: F.dropout(first(x)[0], 0.5), x)
    assert torch.equal(dropped[..., 2:7], part)
    assert torch.allclose(second(dropped)[0], whole, rtol=0, atol=1e-15)


def test_recomputation_draws_the_same_part():
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    position = Position(3, 1, 2, 3, cuts={"h#0": (FEATURES,)})

    def body(x: Tensor) -> Tensor:
        with inside(nn.Module(), "h"):
            return F.dropout(x, 0.4).pow(2)

    with at(position):
        (expected,) = torch.autograd.grad(body(x).sum(), x)
        (found,) = torch.autograd.grad(checkpoint(body, x, use_reentrant=False).sum(), x)  # type: ignore[union-attr]
        assert torch.equal(found, expected)
        with inside(nn.Module(), "h"):
            again, first = capture.capture(), F.dropout(x, 0.4)
    with again():
        assert torch.equal(F.dropout(x, 0.4), first)


def test_the_gradient_of_a_part_is_that_part_of_the_gradient():
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    (whole,) = torch.autograd.grad(stock(lambda x: F.dropout(x, 0.4), x).pow(3).sum(), x)
    mine = x.detach()[..., 2:7].requires_grad_()
    (part,) = torch.autograd.grad(stock(lambda x: F.dropout(x, 0.4), mine, (FEATURES,)).pow(3).sum(), mine)
    assert torch.equal(part, whole[..., 2:7])


def test_the_share_that_is_dropped_is_the_same():
    n = 1 << 12
    with at(Position(1, 0, 0, 8, cuts={"s": (Cut(1, (range(n),), 2 * n),)})):
        y = dropout(torch.ones(8, n, dtype=torch.float64), 0.1, "s")
    assert abs((y == 0).double().mean().item() - 0.1) < 6 * (0.09 / prod(y.shape)) ** 0.5
