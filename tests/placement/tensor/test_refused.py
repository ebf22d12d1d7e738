"""What a grid cannot compute is refused by name, on every rank, before anything is allocated; or it is exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold import wire
from fourfold.placement import placing
from fourfold.placement.refusals import PlacementError
from fourfold.plan import Plan, PlanError
from fourfold.training.losses.classification import classification
from fourfold.training.run import RunError, parallelize
from plain import Work, assert_equal, disturbed, on_threads, serial

from .grouped import Sizes, decoding

WIDTH, HIDDEN = 8, 12


def plan(**grid: int) -> dict[str, Any]:
    return {"placement": {"precision": "fp64", "tensor": {"algorithm": "4d", **grid}}}


def refusals(work: Work, monkeypatch: pytest.MonkeyPatch, **grid: int) -> list[str]:
    """What every rank says; none gets as far as an arena."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an arena was made")

    monkeypatch.setattr(placing, "Arena", never)
    settings = plan(**grid)

    def rank(world: wire.World) -> str:
        with pytest.raises(PlacementError) as caught:
            parallelize(work.fresh(), work.loss, work.options, settings, world=world, example=work.batch(0))
        return str(caught.value)

    return wire.threads.launch(Plan.of(settings).world, rank)


# ---- sizes


@pytest.mark.parametrize(
    ("sizes", "grid", "words"),
    [
        (
            Sizes(heads=6, shared=2),
            {"y": 3},
            r"blocks\.0\.attention\.(query|key|value)\.weight: 2 key-value heads over y = 3: .*nearest: y = 2 or 4",
        ),
        (Sizes(heads=3, shared=3), {"y": 4}, r"attention\.\w+\.weight: 3 heads over y = 4 leave .* at most 3"),
        (Sizes(heads=3, shared=3), {"y": 6}, r"attention\.\w+\.weight: 3 heads over y = 6 leave .* at most 3"),
        (Sizes(heads=4, shared=4), {"x": 15}, r"14 .* over x = 15 leave some rank without any; .* at most 14"),
        (Sizes(heads=4, shared=2), {"y": 8}, r"attention\.\w+\.weight: 4 heads over y = 8 leave some rank without"),
        (Sizes(heads=4, shared=4, hidden=3), {"y": 4}, r"blocks\.0\.(up|gate|down)\.weight: 3 \w+ over y = 4"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_named_with_the_nearest_that_do(
    sizes: Sizes, grid: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    said = refusals(decoding(sizes), monkeypatch, **grid)
    assert all(re.search(words, one) for one in said), said


def test_a_world_that_does_not_fit_names_the_nearest_grids() -> None:
    work = decoding()

    def rank(world: wire.World) -> str:
        with pytest.raises(RunError) as caught:
            parallelize(work.fresh(), work.loss, work.options, plan(x=2, y=2), world=world, example=work.batch(0))
        return str(caught.value)

    for said in wire.threads.launch(6, rank):
        assert "needs 4 ranks, found 6" in said and "x 3, y 2" in said and "x 2, y 3" in said


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
def test_a_size_that_is_none_is_refused_by_the_plan(size: Any) -> None:
    with pytest.raises(PlanError, match=r"plan\.placement\.tensor\.x: expected a whole number of at least 1"):
        Plan.of(plan(x=size))


# ---- functions that shapes do not show


@dataclass(frozen=True)
class Vectors(Work):
    """Rows of three vectors, to classify."""

    rows: int = 3
    steps: int = 2
    loss: Callable[..., Any] = classification

    def batch(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        inputs = torch.randn(self.rows, 3, WIDTH, generator=generator, dtype=torch.float64)
        return {"inputs": inputs, "targets": torch.randint(5, (self.rows,), generator=generator)}


class Net(nn.Module):
    """A residual branch, with something odd on its hidden features or on the residual."""

    ramp: Tensor

    def __init__(self, hidden: Callable[..., Tensor], residual: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("ramp", torch.linspace(0.5, 2, HIDDEN))
        self.hidden, self.residual = hidden, residual or (lambda net, x: x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = self.residual(self, x + self.down(self.hidden(self, self.up(x))))
        return self.leave(x.mean(1))


ODD: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flip": lambda net, y: y.flip(-1),
    "roll": lambda net, y: y.roll(1, -1),
    "avg_pool1d": lambda net, y: F.avg_pool1d(y, 3, 1, 1),
    "div": lambda net, y: y / y.shape[-1],
    "arange": lambda net, y: y * torch.arange(y.shape[-1], dtype=y.dtype, device=y.device),
    "linspace": lambda net, y: y + torch.linspace(0, 1, y.shape[-1], dtype=y.dtype, device=y.device),
    "group_norm": lambda net, y: F.group_norm(y.transpose(1, 2), 2).transpose(1, 2),
    "mul": lambda net, y: y * torch.full((HIDDEN,), 0.5, dtype=y.dtype, device=y.device),
}


def vectors(hidden: Callable[..., Tensor] = lambda net, y: y.tanh(), **more: Any) -> Vectors:
    torch.manual_seed(0)
    return Vectors(disturbed(Net(hidden, **more).double()))


@pytest.mark.parametrize("name", ODD)
def test_what_moves_mixes_or_counts_features_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keep the shapes that a part should have."""
    said = refusals(vectors(ODD[name]), monkeypatch, x=2, y=2)
    assert any(f"the model: {name} " in one for one in said), said
    assert all("the model: " in one or "these ranks say what and where" in one for one in said), said


def test_what_is_odd_on_the_residual_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for residual, words in (
        (ODD["flip"], "the model: flip does not make of a part"),
        (lambda net, x: x.softmax(-1), "the model: softmax across features that are split over x"),
        (lambda net, x: F.normalize(x, dim=-1), "the model: normalize across features that are split over x"),
    ):
        assert any(words in one for one in refusals(vectors(residual=residual), monkeypatch, x=2, y=2))


@pytest.mark.parametrize("name", ["flip", "avg_pool1d"])
def test_it_is_exact_where_these_features_are_whole(name: str) -> None:
    """The hidden features lie over y."""
    work = vectors(ODD[name])
    for found in on_threads(work, plan(x=2)):
        assert_equal(found, serial(work))


@pytest.mark.parametrize(
    "hidden",
    [
        lambda net, y: y.softmax(-1),
        lambda net, y: y.sort(-1).values,
        lambda net, y: torch.cat([y[..., :5].tanh(), y[..., 5:]], -1),
        lambda net, y: y.unflatten(-1, (3, -1)).softmax(-2).flatten(-2),
        lambda net, y: torch.stack([y, y.tanh()], -1).mean(-1) + y.new_full(y.shape[-1:], 0.5),
        lambda net, y: y / y.std(-1, keepdim=True),
    ],
    ids=("softmax", "sort", "slice", "groups", "shapes", "std"),
)
def test_what_can_run_whole_does(hidden: Callable[..., Tensor]) -> None:
    work = vectors(hidden)
    for found in on_threads(work, plan(x=2, y=2)):
        assert_equal(found, serial(work))


# ---- modules that are no single linear


class Doubling(nn.Linear):
    """A linear and something more."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Gated(nn.Module):
    """Has `weight` and `bias`, and an activation of its own."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(out, into)), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.weight, self.bias))


class Named(nn.Module):
    """Calls its weight by another name."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(out, into))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix)


class Turned(nn.Module):
    """A linear without a bias whose weight lies the other way round: it is one, and splits."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(into, out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Attending(nn.Module):
    """Torch's own attention, which computes all its linears in one function."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.leave = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.up(x, x, x, need_weights=False)[0].mean(1))


class Encoding(nn.Module):
    """Torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.leave = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.leave(x.mean(1))


def with_up(layer: Callable[[int, int], nn.Module]) -> Vectors:
    torch.manual_seed(0)
    net = Net(lambda net, y: y.tanh())
    net.up = layer(WIDTH, HIDDEN)  # pyright: ignore[reportAttributeAccessIssue]
    return Vectors(disturbed(net.double()))


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda: with_up(Doubling), r"up\.weight: up (Doubling) calls mul around its weight"),
        (lambda: with_up(Gated), r"up\.weight: up (Gated) calls relu around its weight"),
        (lambda: with_up(Named), r"up\.matrix: is read by up (Named), which holds matrix"),
        (lambda: Vectors(Attending().double()), "up.in_proj_weight: is read by up (MultiheadAttention)"),
        (lambda: Vectors(Encoding().double()), "layers.0.self_attn.in_proj_weight: is read by layers.0.self_attn"),
    ],
)
def test_a_module_that_is_more_than_a_linear_is_named(
    work: Callable[[], Work], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refusals(work(), monkeypatch, x=2, y=2)
    assert all(words.replace("\\", "") in one and "nn.Linear" in one for one in said), said


def test_a_linear_of_somebody_else_is_split() -> None:
    work = with_up(Turned)
    for found in on_threads(work, plan(x=2, y=2)):
        assert_equal(found, serial(work))


# ---- heads by a config


class Configured(nn.Module):
    """An attention that counts its heads by a config: on half of them it would fold heads into time, and run."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.config = {"heads": heads}
        self.enter, self.qkv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        heads, batch, x = self.config["heads"], len(x), self.enter(x)
        parts = (part.reshape(batch, -1, heads, WIDTH // heads) for part in self.qkv(x).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, -1, WIDTH)
        return self.leave((x + self.out(mixed[:, : x.shape[1]])).mean(1))


@pytest.mark.parametrize("heads", [2, 4])
def test_heads_counted_by_a_config_are_found_by_the_rehearsal(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Even(Vectors):
        def batch(self, step: int) -> dict[str, Tensor]:
            batch = super().batch(step)
            return batch | {"inputs": torch.cat([batch["inputs"]] * 2, 1)[:, :4]}

    torch.manual_seed(0)
    work = Even(Configured(heads).double())
    said = refusals(work, monkeypatch, y=2)
    assert all("the model: reshape " in one for one in said), "\n".join(said)


# ---- images


class Convolving(nn.Module):
    """Two convolutions with something between them and the classes."""

    def __init__(self, last: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.norm, self.leave = nn.Conv2d(3, 8, 3, padding=1), last, norm, nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.last(self.first(x).relu())).relu().mean((2, 3)))


class Images(Vectors):
    """Small pictures."""

    def batch(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        inputs = torch.randn(self.rows, 3, 6, 6, generator=generator, dtype=torch.float64)
        return {"inputs": inputs, "targets": torch.randint(5, (self.rows,), generator=generator)}


def images(last: nn.Module, norm: nn.Module) -> Images:
    return Images(disturbed(Convolving(last, norm).double()))


@pytest.mark.parametrize(
    ("last", "norm", "words"),
    [
        (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), "norm: batch_norm keeps statistics of channels"),
        (nn.Conv2d(8, 8, 1), nn.GroupNorm(1, 8), "norm: a group of its channels lies over several ranks of y"),
        (nn.Conv2d(8, 8, 1), nn.InstanceNorm2d(8, affine=True), "fails on a part of the heads or features"),
        (nn.Conv2d(8, 8, 1), nn.ChannelShuffle(2), "norm: channel_shuffle does not make of a part"),
        (nn.Conv2d(8, 8, 1), nn.LocalResponseNorm(3), "norm: local_response_norm does not make of a part"),
    ],
)
def test_what_joins_channels_is_named(
    last: nn.Module, norm: nn.Module, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refusals(images(last, norm), monkeypatch, x=2, y=2)
    assert any(words in one for one in said), said


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_groups_of_channels_lie_whole_on_the_ranks(groups: int) -> None:
    torch.manual_seed(0)
    work = images(nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), nn.GroupNorm(groups, 8))
    for found in on_threads(work, plan(x=2, y=2)):
        assert_equal(found, serial(work))


class Pooled(nn.Module):
    """Words by their scores, which are products with a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(37, WIDTH), nn.Linear(WIDTH, 37)
        self.query = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(x * F.linear(x, self.query.view(1, -1)))


def test_a_vector_that_contracts_features_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in refusals(Work(Pooled().double()), monkeypatch, x=2):
        assert said.startswith("query: the model sums its products with features that lie over x")
