"""Streams by index, dropout by logical position, and the mode that gives them to stock code."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.randomness import (
    Layout,
    Position,
    RandomnessError,
    Window,
    at,
    bits,
    current,
    dropout,
    inside,
    normal,
    permutation,
    uniform,
)
from fourfold.randomness.philox import _words

# ---------------------------------------------------------------- streams


def test_words_are_philox4x64_10():
    """Philox4x64-10 of key 0; numpy raises the counter before it generates, hence block k shows counter k + 1.

    The known answer for key 0, counter 0 is from Random123's kat_vectors (Salmon et al., SC 2011).
    """
    first = np.random.Philox(key=0, counter=2**256 - 1).random_raw(4)
    assert [hex(word) for word in first] == [
        "0x16554d9eca36314c",
        "0xdb20fe9d672d0fdc",
        "0xd7e772cee186176b",
        "0x7e68b68aec7ba23b",
    ]
    words = _words(3, "a", 5, 1, 0, 12)
    again = np.random.Generator(np.random.Philox(key=_key(3, "a"), counter=[0, 5, 1, 0])).bit_generator.random_raw(12)
    assert (words == again).all()


def _key(seed: int, site: str) -> np.ndarray:
    from hashlib import blake2b

    return np.array([seed, int.from_bytes(blake2b(site.encode(), digest_size=8).digest(), "little")], dtype=np.uint64)


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 900), count=st.integers(0, 120), site=st.text(max_size=8), step=st.integers(0, 5))
def test_any_slice_is_the_slice_of_the_whole(start: int, count: int, site: str, step: int):
    stop = start + count
    assert (bits(7, site, step, start, count) == bits(7, site, step, 0, 1024)[start:stop]).all()
    assert torch.equal(uniform(7, site, start, count), uniform(7, site, 0, 1024)[start:stop])
    assert torch.equal(
        normal(7, site, start, count, torch.float64), normal(7, site, 0, 1024, torch.float64)[start:stop]
    )


def test_a_slice_far_away_costs_nothing():
    assert bits(1, "w", 0, 2**50 + 3, 5).shape == (5,)
    assert torch.isfinite(normal(1, "w", 2**50 + 3, 5)).all()


def test_streams_differ_by_seed_site_and_step():
    base = bits(1, "a", 0, 0, 64)
    assert (base == bits(1, "a", 0, 0, 64)).all()
    for other in (bits(2, "a", 0, 0, 64), bits(1, "b", 0, 0, 64), bits(1, "a", 1, 0, 64)):
        assert (base != other).mean() > 0.9


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed: int):
    with pytest.raises(RandomnessError, match="seed .* 'a'"):
        bits(seed, "a", 0, 0, 1)


def test_distributions():
    n = 1 << 16
    u, z = uniform(5, "u", 0, n, torch.float64), normal(5, "z", 0, n, torch.float64)
    assert 0 <= u.min() and u.max() < 1
    # six standard errors: sqrt(1/12/n), 1/sqrt(n), sqrt(2/n)
    assert abs(u.mean() - 0.5) < 6 * (1 / 12 / n) ** 0.5
    assert abs(z.mean()) < 6 / n**0.5
    assert abs(z.var() - 1) < 6 * (2 / n) ** 0.5
    assert abs((z.abs() < 1).double().mean() - 0.6826894921) < 6 * 0.5 / n**0.5


def test_extreme_words_give_finite_normals(monkeypatch: pytest.MonkeyPatch):
    from fourfold.randomness import philox

    extremes = np.array([0, 2**64 - 1], dtype=np.uint64)
    monkeypatch.setattr(philox, "_words", lambda *_: extremes)
    low, high = normal(0, "w", 0, 2, torch.float64).tolist()
    assert -8.4 < low < -8.2 < 8.2 < high < 8.4


def test_permutation():
    order = permutation(3, "data", 1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert (order == permutation(3, "data", 1000)).all()
    assert (order != permutation(4, "data", 1000)).any()
    assert (order == np.arange(1000)).mean() < 0.02


# ---------------------------------------------------------------- the op


def test_mask_follows_the_formula():
    x = torch.randn(4, 6, dtype=torch.float64)
    with at(Position(seed=9, step=2, row=3, rows=4)):
        y, keep = torch.ops.fourfold.dropout(x, 0.3, "s")
    cut = round(0.3 * 65536)
    lanes = torch.from_numpy(bits(9, "s", 2, 18, 24).astype(np.int32)).view(4, 6)
    assert torch.equal(keep, lanes >= cut)
    assert torch.equal(y, x * keep * (65536 / (65536 - cut)))


def test_rate_and_mean():
    n = 1 << 18
    with at(Position(1, 0, 0, 1)):
        y = dropout(torch.ones(1, n, dtype=torch.float64), 0.1, "s")
    rate = (y == 0).double().mean().item()
    assert abs(rate - 0.1) < 6 * (0.09 / n) ** 0.5
    assert abs(y.mean().item() - 1) < 6 * (0.1 / 0.9 / n) ** 0.5


@pytest.mark.parametrize("p, kept", [(0.0, 1), (1.0, 0)])
def test_the_two_ends(p: float, kept: int):
    with at(Position(1, 0, 0, 1)):
        assert torch.equal(dropout(torch.ones(1, 9), p, "s"), torch.full((1, 9), float(kept)))


def test_gradient_is_the_masked_scaled_gradient():
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    with at(Position(1, 0, 0, 2)):
        assert torch.autograd.gradcheck(lambda x: dropout(x, 0.4, "s"), (x,))
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.fourfold.dropout.default, (x, 0.4, "s"), test_utils=checks)


def test_only_the_bool_mask_is_saved():
    saved: list[Tensor] = []
    x = torch.randn(2, 5, requires_grad=True)
    with (
        at(Position(1, 0, 0, 2)),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        dropout(x, 0.4, "s")
    assert [tensor.dtype for tensor in saved] == [torch.bool]


def test_memory_order_does_not_change_the_mask():
    x = torch.ones(4, 3, 5)
    with at(Position(1, 0, 0, 4)):
        straight = dropout(x, 0.5, "s")
        strided = dropout(torch.ones(4, 5, 3).transpose(1, 2), 0.5, "s")
    assert torch.equal(straight, strided)


@pytest.mark.parametrize("shape", [(3, 4), (1, 8), ()])
def test_where_rows_do_not_fit_every_part_draws_its_own_and_it_is_said(shape: tuple[int, ...]):
    """Experts chosen by value have any number of tokens: a run does not end by it, and repeats when recomputed."""

    def drawn(row: int) -> Tensor:
        with at(Position(1, 0, row, 2)), pytest.warns(UserWarning, match=r"not exact: .*'h\.0#1'.*whole rows"):
            return torch.ops.fourfold.dropout(torch.ones(shape), 0.5, "h.0#1")[1]

    assert torch.equal(drawn(0), drawn(0)) and drawn(0).shape == shape
    with at(Position(1, 0, 4, 2, {"h.0#1": Layout(0, "apart")})):
        assert torch.equal(drawn(4), torch.ops.fourfold.dropout(torch.ones(shape), 0.5, "h.0#1")[1])


# (outer, rows, inner) is how a row's elements lie apart: time first; time × rows; two copies × rows.
LAYOUTS = {
    "dim 1": (Layout(1, "slowest"), (5, 4, 6), 5),
    "dim 2, rows × heads": (Layout(2, "slowest"), (5, 2, 4 * 3, 6), 10),
    "rows fastest": (Layout(0, "fastest"), (5 * 4, 6), 5),
    "rows fastest in dim 1": (Layout(1, "fastest"), (2, 5 * 4, 6), 10),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_masks_follow_the_rows_in_any_dim(case: str):
    """Element e of logical row r is element r · (elements a row) + e of the stream, wherever the row lies."""
    layout, shape, outer = LAYOUTS[case]
    x = torch.ones(shape)
    per_row = x.numel() // 4
    with at(Position(9, 2, 3, 4, {"s": layout})):
        keep = torch.ops.fourfold.dropout(x, 0.3, "s")[1]
    lanes = torch.from_numpy(bits(9, "s", 2, 3 * per_row, x.numel()).astype(np.int32)).view(4, outer, -1)
    rows = keep.view(outer, 4, -1)
    for row in range(4):
        assert torch.equal(rows[:, row], lanes[row] >= round(0.3 * 65536))


def test_a_tensor_without_rows_has_one_mask_everywhere():
    def mask(row: int, rows: int) -> Tensor:
        with at(Position(9, 2, row, rows, {"s": Layout(0, "shared")})):
            return torch.ops.fourfold.dropout(torch.ones(3, 50), 0.3, "s")[1]

    assert torch.equal(mask(0, 4), mask(2, 2)) and torch.equal(mask(0, 4), mask(7, 1))


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_windows_of_the_rows_draw_what_the_whole_draws(parts: int):
    """As even as can be, the first ones with a row more: together they are the mask of all rows."""
    position = Position(9, 2, 3, 7)

    def mask(window: Window | None, rows: int) -> Tensor:
        with at(position if window is None else position._replace(windows={"s": window})):
            return torch.ops.fourfold.dropout(torch.ones(rows, 50), 0.3, "s")[1]

    sizes = [7 // parts + (part < 7 % parts) for part in range(parts)]
    found = [mask(Window(part, parts), rows) for part, rows in enumerate(sizes)]
    assert torch.equal(torch.cat(found), mask(None, 7))


def test_where_rows_cannot_be_told_every_part_draws_its_own():
    def mask(row: int, rows: int) -> Tensor:
        with at(Position(9, 2, row, rows, {"s": Layout(0, "apart")})):
            return torch.ops.fourfold.dropout(torch.ones(3, 50), 0.3, "s")[1]

    assert torch.equal(mask(0, 4), mask(0, 4))
    assert not torch.equal(mask(0, 2), mask(2, 2))


def test_a_dim_that_does_not_hold_the_rows_is_named():
    with at(Position(1, 0, 0, 2, {"s": Layout(1, "slowest")})), pytest.warns(UserWarning, match="'s': dim 1 of its"):
        dropout(torch.ones(4, 3), 0.5, "s")


def test_the_op_needs_a_position():
    with pytest.raises(RandomnessError, match="outside of any position"):
        dropout(torch.ones(2), 0.5, "s")


def test_position_is_of_the_thread_and_nests():
    seen: list[object] = []
    outer, inner = Position(1, 0, 0, 2), Position(1, 0, 2, 2)
    with at(outer):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        with at(inner):
            assert current() == inner
        assert current() == outer
    assert seen == [None] and current() is None


def test_the_cuda_kernel_draws_one_key_a_row_on_meta():
    """The CUDA path's calls and shapes, on meta; its numbers were not seen: no GPU here."""
    from fourfold.randomness.dropout import _keep_cuda

    with at(Position(1, 0, 0, 4)):
        keep = _keep_cuda(torch.empty(4, 6, device="meta"), 0.1, "s")
    assert keep.shape == (4, 6) and keep.dtype == torch.bool


# ---------------------------------------------------------------- the mode


class Block(nn.Module):
    """Attention with dropout, a dropout module, and one more call of the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).view(x.shape[0], -1, 2, 4).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3 * self.training, is_causal=True)
        return self.drop(x + self.drop(mixed.transpose(1, 2).reshape(x.shape)))


def run(block: nn.Module, x: Tensor, position: Position | None, path: str = "h.0") -> Tensor:
    with at(position), inside(block, path):
        return block(x)


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().train()


def test_any_cut_of_the_rows_draws_the_same(block: Block):
    x = torch.randn(6, 5, 8, dtype=torch.float64)
    whole = run(block, x, Position(1, 3, 0, 6))
    for cut in ([6], [1] * 6, [2, 4], [3, 1, 2]):
        starts = np.cumsum([0, *cut])
        parts = [run(block, x[a : a + n], Position(1, 3, int(a), n)) for a, n in zip(starts, cut, strict=False)]
        assert torch.allclose(torch.cat(parts), whole, rtol=0, atol=1e-15)
    assert not torch.allclose(run(block, x, Position(1, 4, 0, 6)), whole)
    assert not torch.allclose(run(block, x, Position(1, 3, 0, 6), "h.1"), whole)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_draws_the_same(block: Block, reentrant: bool):
    x = torch.randn(4, 5, 8, dtype=torch.float64, requires_grad=True)

    def body(x: Tensor) -> Tensor:
        with inside(block, "h.0"):
            return block(x)

    with at(Position(1, 0, 0, 4)):
        (expected,) = torch.autograd.grad(body(x).pow(2).sum(), x)
        checkpoint(body, x, use_reentrant=reentrant, preserve_rng_state=False).pow(2).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, expected)


def test_torchs_generator_is_not_touched(block: Block):
    before = torch.get_rng_state()
    run(block, torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator()), Position(1, 0, 0, 4))
    assert torch.equal(before, torch.get_rng_state())


def test_without_position_or_in_eval_torch_is_left_alone(block: Block):
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    torch.manual_seed(3)
    plain = block(x)
    torch.manual_seed(3)
    assert torch.equal(run(block, x, None), plain)
    block.eval()
    assert torch.equal(run(block, x, Position(1, 0, 0, 4)), block(x))


@pytest.mark.parametrize("where", ["scope inside the graph", "scope around the graph"])
def test_compiled_blocks_have_one_graph_and_the_same_numbers(block: Block, where: str):
    torch._dynamo.reset()
    x = torch.randn(4, 5, 8, dtype=torch.float64, requires_grad=True)

    def scoped(call):
        def body(x: Tensor) -> Tensor:
            with inside(block, "h.0"):
                return call(x)

        return body

    def compiled(call):
        return torch.compile(call, fullgraph=True, backend="aot_eager")

    graph = compiled(scoped(block)) if where == "scope inside the graph" else scoped(compiled(block))
    for step in range(2):
        with at(Position(1, step, 0, 4)):
            (expected,) = torch.autograd.grad(scoped(block)(x).pow(2).sum(), x)
            (found,) = torch.autograd.grad(graph(x).pow(2).sum(), x)
        assert torch.allclose(found, expected, rtol=0, atol=1e-14)
    assert torch._dynamo.utils.counters["graph_break"] == {}


def test_around_the_blocks_sites_hang_on_the_block_before_not_on_a_count():
    """A stage that owns only the last block and the head names the head's dropout as one process does."""
    model, ones = nn.Module(), torch.ones(2, 64)

    def step(*, embed: bool, blocks: list[str]) -> Tensor:
        with at(Position(1, 0, 0, 2)), inside(model, ""):
            if embed:
                F.dropout(ones)
            for path in blocks:
                with inside(model, path):
                    F.dropout(ones)
            return F.dropout(ones)

    whole = step(embed=True, blocks=["h.0", "h.1"])
    assert torch.equal(whole, step(embed=False, blocks=["h.1"]))
    assert not torch.equal(whole, step(embed=True, blocks=["h.0"]))


# A probability that rounds to no lane at all leaves the values alone but takes the replaced path.
TINY = 1e-9


@pytest.mark.parametrize("masked", ["none", "causal", "bool", "float", "blind row", "gqa", "scale"])
def test_attention_formula_is_torchs(masked: str):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 3, dtype=torch.float64, generator=generator) for _ in range(3))
    mask = torch.rand(5, 5, generator=generator) > 0.3
    mask[:, 0] = True
    blind = mask.clone()
    blind[2] = False
    arguments = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": mask},
        "float": {"attn_mask": mask.double()},
        "blind row": {"attn_mask": blind},
        "gqa": {"enable_gqa": True},
        "scale": {"scale": 0.7},
    }[masked]
    if masked == "gqa":
        k, v = k[:, :2], v[:, :2]
    expected = F.scaled_dot_product_attention(q, k, v, **arguments)
    with at(Position(1, 0, 0, 2)), inside(nn.Module(), "h"):
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=TINY, **arguments)
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("function", [F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout])
def test_channel_dropout_takes_whole_channels(function):
    shape = (4, 16) + (3,) * {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3, F.feature_alpha_dropout: 1}[function]
    with at(Position(1, 0, 0, 4)), inside(nn.Module(), "h"):
        y = function(torch.ones(shape, dtype=torch.float64), 0.5, True).flatten(2)
    assert (y == y[..., :1]).all() and len(y.unique()) == 2


@pytest.mark.parametrize("p", [0.25, 1.0])
def test_alpha_dropout_is_torchs_map_of_kept_and_dropped(p: float):
    x = torch.randn(4, 4096, dtype=torch.float64)
    with at(Position(1, 0, 0, 4)), inside(nn.Module(), "h"):
        ours = F.alpha_dropout(x, p, training=True)
    torchs = F.alpha_dropout(x, p, training=True)
    dropped = torchs[0].mode().values
    # every element is either the one dropped value or an affine map of x with torch's two coefficients
    assert torch.allclose(ours[(ours - dropped).abs() < 1e-12], dropped)
    kept_ours, kept_torchs = ((y - dropped).abs() > 1e-9 for y in (ours, torchs))
    both = kept_ours & kept_torchs
    assert torch.allclose(ours[both], torchs[both], rtol=0, atol=1e-12)
    assert abs(kept_ours.double().mean().item() - (1 - p)) < 0.03


@pytest.mark.parametrize("call", [F.dropout, torch.dropout_])
def test_in_place(call):
    x = torch.ones(2, 32)
    arguments = (0.5, True, True) if call is F.dropout else (0.5, True)
    with at(Position(1, 0, 0, 2)), inside(nn.Module(), "h"):
        y = call(x, *arguments)
    assert y is x and set(x.unique().tolist()) == {0.0, 2.0}


def test_multihead_attention_and_encoder_layers_are_seen():
    """Composite functions hand themselves to the mode as a whole; what they call inside must be seen all the same."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, dtype=torch.float64).train()
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    before = torch.get_rng_state()
    whole = run(layer, x, Position(1, 0, 0, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.allclose(run(layer, x[2:], Position(1, 0, 2, 2)), whole[2:], rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("settings", [{}, {"bidirectional": True}, {"bias": False}, {"proj_size": 2}])
def test_recurrent_layers_drop_out_between_them(kind: type, settings: dict):
    if "proj_size" in settings and kind is not nn.LSTM:
        settings = {}
    torch.manual_seed(0)
    layers = kind(4, 5, num_layers=3, batch_first=True, dtype=torch.float64, **settings).train()
    x = torch.randn(4, 3, 4, dtype=torch.float64)

    def flat(found) -> list[Tensor]:
        out, state = found
        return [out, *(state if isinstance(state, tuple) else (state,))]

    plain = flat(layers(x))
    layers.dropout = TINY
    for mine, theirs in zip(flat(run(layers, x, Position(1, 0, 0, 4))), plain, strict=True):
        assert torch.equal(mine, theirs), "layer by layer is what torch computes"
    layers.dropout = 0.4
    before = torch.get_rng_state()
    whole = flat(run(layers, x, Position(1, 0, 0, 4)))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.allclose(whole[0], plain[0])
    parts = [flat(run(layers, x[2 * half : 2 * half + 2], Position(1, 0, 2 * half, 2))) for half in range(2)]
    assert torch.allclose(torch.cat([part[0] for part in parts]), whole[0], rtol=0, atol=1e-14)
    for index in range(1, len(whole)):
        state = torch.cat([part[index] for part in parts], 1)
        assert torch.allclose(state, whole[index], rtol=0, atol=1e-14)


def test_dropout_between_the_layers_of_an_lstm_on_packed_sequences_is_refused():
    lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5).train()
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    with pytest.raises(RandomnessError, match=r"lstm drops out between its layers .* on packed sequences"):
        run(lstm, packed, Position(1, 0, 0, 2), "encoder")  # type: ignore[arg-type]
    lstm.dropout = 0.0
    assert run(lstm, packed, Position(1, 0, 0, 2), "encoder")[0].data.shape == (5, 4)  # type: ignore[arg-type]
