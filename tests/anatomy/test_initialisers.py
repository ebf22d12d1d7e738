"""Initialisers recorded on meta: replayed by slice, equal in law to the constructor's, buffers bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fourfold.anatomy import InitialiserError, deferred, initialiser, materialize, recorded, ties
from fourfold.models import gpt
from fourfold.randomness import normal, uniform


def build_gpt() -> nn.Module:
    return gpt.GPT(gpt.Config(vocabulary=40, context=16, layers=2, width=32, heads=4))


def test_a_weight_is_its_stream():
    model = deferred(build_gpt)
    values = initialiser(model, "blocks.1.mlp.contract.weight").values(7, 0, 32 * 128)
    stream = normal(7, "blocks.1.mlp.contract.weight:0", 0, 32 * 128, torch.float64)
    assert torch.equal(values, (stream * (0.02 / 2)).float())
    assert initialiser(model, "blocks.0.norm1.weight").values(7, 3, 6).tolist() == [1.0, 1.0, 1.0]


def test_deferred_holds_no_memory_and_touches_no_generator():
    before = torch.get_rng_state()
    model = deferred(build_gpt)
    assert all(p.is_meta for p in model.parameters()) and recorded(model).device == "meta"
    materialize(model, 1)
    assert torch.equal(before, torch.get_rng_state())


def same_law(ours: Tensor, theirs: Tensor) -> bool:
    """Equal shape and dtype, and mean and standard deviation within six standard errors, or both constant and equal."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    if theirs.numel() < 2 or theirs.std() == 0:
        return torch.equal(ours, theirs)
    error = theirs.std() / theirs.numel() ** 0.5
    return bool((ours.mean() - theirs.mean()).abs() < 9 * error and (ours.std() - theirs.std()).abs() < 9 * error)


@torch.no_grad()
def compare(build) -> nn.Module:
    model, plain = deferred(build), build()
    made = materialize(model, 3)
    parameters = dict(plain.named_parameters())
    assert [name for name, _ in made.named_parameters()] == list(parameters)
    for name, parameter in made.named_parameters():
        assert same_law(parameter, parameters[name]), name
        init = initialiser(model, name)
        third = parameter.numel() // 3
        assert not init.whole, name
        assert torch.equal(init.values(3, third, 2 * third + 1), parameter.reshape(-1)[third : 2 * third + 1]), name
    buffers = dict(plain.named_buffers())
    for name, buffer in made.named_buffers():
        assert torch.equal(buffer, buffers.pop(name)), name
    assert not buffers
    assert ties(made) == ties(plain)
    return made


def test_gpt():
    compare(build_gpt)


def test_stock_architectures(architecture):
    made = compare(architecture.build).eval()
    logits = architecture.logits(made, architecture.batch())
    assert not logits.is_meta and torch.isfinite(logits).all()


def test_float64():
    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return build_gpt()
        finally:
            torch.set_default_dtype(before)

    made, single = compare(build), materialize(deferred(build_gpt), 3)
    for (name, double), other in zip(made.named_parameters(), single.parameters(), strict=True):
        assert double.dtype == torch.float64
        assert torch.equal(double.float(), other), f"{name}: the streams do not hang on the dtype"


def test_values_are_rounded_to_the_dtype_asked_for():
    init = initialiser(deferred(build_gpt), "tokens.weight")
    assert torch.equal(init.values(1, 5, 90, torch.bfloat16), init.values(1, 5, 90).bfloat16())


class Zoo(nn.Module):
    """Every way of setting a value that constructors use."""

    def __init__(self) -> None:
        super().__init__()
        self.default = nn.Linear(6, 4)
        self.embedding = nn.Embedding(5, 4, padding_idx=2)
        self.drawn = nn.Parameter(torch.randn(4, 3) * 0.5 + 1)
        self.cast = nn.Parameter(torch.rand(8, dtype=torch.float64).float())
        self.left = nn.Parameter(torch.empty(3))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 40), std=0.02, a=-0.03, b=0.03))
        self.packed = nn.Parameter(torch.empty(6, 4))
        with torch.no_grad():
            self.packed[:2].fill_(1.0)
            self.packed[2:4].normal_(5.0, 0.1)
            self.packed[4:].zero_()
        self.twice = nn.Parameter(torch.zeros(7).normal_())
        with torch.no_grad():
            self.twice.add_(torch.empty(7).uniform_(-1, 1))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 4)))
        self.striped = nn.Parameter(torch.zeros(4, 4))
        with torch.no_grad():
            self.striped[:, 1].uniform_(2, 3)
        self.dirac = nn.Parameter(nn.init.dirac_(torch.empty(3, 3, 3)))
        self.register_buffer("table", torch.outer(torch.arange(3.0), torch.tensor([1.0, 10.0])).cos())
        self.register_buffer("literal", torch.tensor([1, 2, 3]), persistent=False)
        self.plain = torch.arange(4) * 2


WHOLE = {"orthogonal", "striped", "dirac", "table", "literal", "plain"}
ZOO = [
    "default.weight",
    "default.bias",
    "embedding.weight",
    "drawn",
    "cast",
    "left",
    "truncated",
    "packed",
    "twice",
    "dirac",
]


@pytest.fixture(scope="module")
def zoo() -> nn.Module:
    return deferred(Zoo)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from([*ZOO, *sorted(WHOLE)]), low=st.floats(0, 1), high=st.floats(0, 1))
def test_any_slice_is_the_slice_of_the_whole(zoo: nn.Module, name: str, low: float, high: float):
    init = initialiser(zoo, name)
    numel = math.prod(init.shape)
    start, stop = sorted((round(low * numel), round(high * numel)))
    whole = materialize(zoo, 11)
    owner, _, leaf = name.rpartition(".")
    expected = getattr(whole.get_submodule(owner), leaf).detach()
    assert torch.equal(init.values(11, start, stop), expected.reshape(-1)[start:stop])
    assert init.whole == (name in WHOLE)


def test_zoo_by_formula(zoo: nn.Module):
    whole, plain = materialize(zoo, 11), Zoo()
    assert isinstance(whole, Zoo)

    def z(site: str, count: int) -> Tensor:
        return normal(11, site, 0, count, torch.float64)

    bound = 1 / 6**0.5
    unit = uniform(11, "default.weight:0", 0, 24, torch.float64).view(4, 6)
    assert torch.allclose(whole.default.weight.double(), (2 * unit - 1) * bound, atol=1e-7)
    assert torch.equal(whole.embedding.weight[2], torch.zeros(4)) and (whole.embedding.weight[3] != 0).all()
    assert torch.allclose(whole.drawn.double(), z("drawn:0", 12).view(4, 3) * 0.5 + 1, atol=1e-6)
    assert torch.equal(whole.left, torch.zeros(3))
    assert whole.truncated.abs().max() <= 0.03 and abs(whole.truncated.std().item() - 0.0148) < 0.002
    assert torch.allclose(whole.packed[2:4].double(), 5 + 0.1 * z("packed:0", 16)[8:].view(2, 4), atol=1e-6)
    assert (whole.packed[:2] == 1).all() and (whole.packed[4:] == 0).all()
    second = 2 * uniform(11, "twice:1", 0, 7, torch.float64) - 1
    assert torch.allclose(whole.twice.double(), z("twice:0", 7) + second, atol=1e-6)
    assert torch.allclose(whole.orthogonal.T @ whole.orthogonal, torch.eye(4), atol=1e-5)
    assert ((whole.striped[:, 1] >= 2) & (whole.striped[:, 1] <= 3)).all() and whole.striped[:, 0].abs().max() == 0
    for name in ("dirac", "table", "literal", "plain"):
        assert torch.equal(getattr(whole, name), getattr(plain, name)), name


def test_a_constructor_that_asks_for_values_runs_on_cpu_and_says_so():
    class ByValue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
            self.layers = nn.ModuleList(nn.Linear(4, 4) for rate in rates if rate < 1)

    model = deferred(ByValue)
    assert recorded(model).device == "cpu" and "item" in recorded(model).reason
    assert all(p.is_meta for p in model.parameters())
    one, two = materialize(model, 5), materialize(model, 5)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    unit = uniform(5, "layers.1.weight:0", 0, 16, torch.float64)
    assert torch.allclose(one.get_parameter("layers.1.weight").view(-1).double(), unit - 0.5, atol=1e-7)


def test_buffers_may_be_written_by_the_owner_without_a_trace_in_the_recording():
    model = deferred(lambda: nn.BatchNorm1d(3))
    materialize(model, 1).running_mean.add_(1)  # type: ignore[operator]
    assert torch.equal(materialize(model, 1).running_mean, torch.zeros(3))  # type: ignore[arg-type]


def test_mistakes_are_named():
    model = deferred(lambda: nn.Linear(3, 2))
    with pytest.raises(InitialiserError, match="Linear has no parameter or buffer 'wieght'"):
        initialiser(model, "wieght")
    with pytest.raises(InitialiserError, match=r"weight: slice \[4, 9\) is not inside its 6 elements"):
        initialiser(model, "weight").values(1, 4, 9)
    with pytest.raises(InitialiserError, match="expected a model made by deferred"):
        materialize(nn.Linear(3, 2), 1)
    with pytest.raises(InitialiserError, match="randperm draws in an order of its own"):
        deferred(lambda: nn.ParameterList([nn.Parameter(torch.randperm(5).float())]))
