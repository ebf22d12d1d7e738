"""Modules that nobody can split, computed by batch rows: the numbers of one process, the bytes of the formulas."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.ledger import Flow, Traffic
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.product import product
from fourfold.placement.tensor.resplit import Lying, Resplit
from fourfold.placement.tensor.rowwise import Held
from fourfold.plan import Plan, PlanError
from fourfold.training.losses.classification import classification
from fourfold.training.run import parallelize
from fourfold.wire.formulas import shares
from fourfold.wire.threads import launch
from plain import Work, assert_equal, disturbed, on_threads, serial, stock_work

from .grids import close, draw, part

# ---- rows for features


def resplit_of(world: wire.World, x: int, y: int, rows: int) -> Resplit:
    mesh = wire.Mesh(world, {"x": x, "y": y})
    found = Resplit(mesh["x"], mesh["y"])
    found.rows = rows
    return found


def lying(axis: wire.Axis, features: int) -> Lying:
    return Lying(axis, shares(features, axis.size))


GRIDS = [(2, 2), (3, 1), (1, 3), (3, 2), (2, 3)]


@pytest.mark.parametrize(("x", "y"), GRIDS)
@pytest.mark.parametrize("over", ["x", "y", None])
@pytest.mark.parametrize(("dim", "each"), [(0, 1), (0, 3), (1, 1)])
def test_rows_and_features_change_places_and_back(x: int, y: int, over: str | None, dim: int, each: int) -> None:
    """Uneven rows and features; several entries a row; rows in another dim. The gradient is that of one process."""
    rows, features = 11, 7
    whole = draw(*((rows * each, 2) if dim == 0 else (2, rows)), features, seed=1)
    upstream = draw(*whole.shape, seed=2)
    shared = whole.clone().requires_grad_()
    (shared.sin() * upstream).sum().backward()

    def body(world: wire.World) -> None:
        resplit = resplit_of(world, x, y, rows)
        axis = {"x": resplit.x, "y": resplit.y, None: None}[over]
        lies = None if axis is None else lying(axis, features)

        def here(tensor: Tensor) -> Tensor:
            return tensor if axis is None else tensor.tensor_split(axis.size, -1)[axis.index]

        mine = here(whole).clone().requires_grad_()
        own = resplit.own(mine, Held(dim, each), lies)
        first = sum(shares(rows, x * y)[: world.rank]) * each
        assert torch.equal(own, whole.narrow(dim, first, own.shape[dim]))
        back = resplit.all(own.sin(), Held(dim, each), lies)
        assert torch.equal(back, here(whole.sin()))
        back.backward(here(upstream))
        assert mine.grad is not None and shared.grad is not None
        assert torch.equal(mine.grad, here(shared.grad))

    launch(x * y, body)


M, K, N = 32, 16, 48
"""The vector of a virtual-rank simulation of AxoNN: of 2 x 2 x 2 ranks, its easy mode sends 288 / 416 elements more."""
EASY = (288, 416)


def elements(ledger: Any) -> int:
    return ledger.sent() // 8


def test_a_module_sends_what_the_formula_says() -> None:
    """Given features over x, and giving them over x, over y, or whole; m = M / xyz rows a rank."""
    x, y, m = 2, 2, M // 8
    wanted = {
        "x": ((x - 1) * m * K // x + (x - 1) * m * N // x + (y - 1) * m * N, (x - 1) * m * N // x),
        "y": ((x - 1) * m * K // x + (y - 1) * m * N // y + (x - 1) * m * N, (y - 1) * m * N // y),
        None: ((x - 1) * m * K // x + (x * y - 1) * m * N, 0),
    }
    back = (x - 1) * m * K // x + (y - 1) * m * K

    def body(world: wire.World) -> dict[str | None, tuple[int, int]]:
        found = {}
        for over in wanted:
            resplit = resplit_of(world, x, y, M // 2)
            axes = {"x": resplit.x, "y": resplit.y}
            ledger = resplit.x.ledger
            mine = torch.ones(M // 2, K // x, dtype=torch.float64, requires_grad=True)
            own = resplit.own(mine, Held(0, 1), lying(resplit.x, K))
            out = resplit.all(own.repeat(1, N // K), Held(0, 1), None if over is None else lying(axes[over], N))
            forward = elements(ledger)
            out.sum().backward()
            found[over] = forward, elements(ledger) - forward
        return found

    for found in launch(4, body):
        assert found == {over: (forward, backward + back) for over, (forward, backward) in wanted.items()}
        assert found == {"x": (320, 192), "y": (320, 192), None: (32 + 576, 96)}


def test_a_split_linear_between_rows_as_axonns_easy_layers_have_it() -> None:
    """The batch is split outside, features inside: the same two exchanges, the other way round.

    AxoNN's forward is (C-1)/C mK + (R-1)mK + (R-1)/R CmN, its backward (C-1)mN + (R-1)/R CmN + (C-1)/C mK. The trade of
    outputs is of rows that are then thrown away but for a C-th: here they are cut first, and (R-1)/R (C-1) mN is saved.
    """
    c, r, m = 2, 2, M // 8
    whole, weight, upstream = draw(M // 2, K, seed=1), draw(N, K, seed=2), draw(M // 2, N, seed=3)

    def body(world: wire.World) -> tuple[tuple[int, int], tuple[int, int]]:
        resplit = resplit_of(world, c, r, M // 2)
        mesh = {"x": resplit.x, "y": resplit.y}
        held, ledger = Held(0, 1), resplit.x.ledger
        at = slice(m * world.rank, m * (world.rank + 1))
        mine = whole[at].clone().requires_grad_()
        block = part(weight, {"y": 0, "x": 1}, mesh).requires_grad_()  # pyright: ignore[reportArgumentType]
        given = resplit.all(mine, held, lying(resplit.x, K))
        before = elements(ledger)
        (made,) = product(given, [block], [None], contract=resplit.x, output=resplit.y)
        inside = elements(ledger) - before
        out = resplit.own(made, held, lying(resplit.y, N))
        close(out, (whole @ weight.t())[at], whole @ weight.t())
        forward = elements(ledger)
        out.backward(upstream[at])
        assert mine.grad is not None and block.grad is not None
        close(mine.grad, (upstream @ weight)[at], upstream @ weight)
        gradient = upstream.t() @ whole
        close(block.grad, part(gradient, {"y": 0, "x": 1}, mesh), gradient)  # pyright: ignore[reportArgumentType]
        sums = 2 * (r - 1) * (M // 2) * (K // c) // r
        return (forward - inside, elements(ledger) - forward - sums), (inside, sums)

    saved = (r - 1) * (c - 1) * m * N // r
    for extra, inside in launch(4, body):
        assert extra == (EASY[0] - saved, EASY[1] - saved) == (192, 320)
        assert extra == (
            (c - 1) * m * K // c + (r - 1) * m * K + (r - 1) * m * N // r,
            (c - 1) * m * N + (r - 1) * m * N // r + (c - 1) * m * K // c,
        )
        assert inside == (2 * (c - 1) * (M // 2) * (N // r) // c, 2 * (r - 1) * (M // 2) * (K // c) // r)


def test_too_few_rows_are_refused() -> None:
    def body(world: wire.World) -> None:
        with pytest.raises(PlacementError, match=r"by_rows: expected a row .* each of 3 ranks .* found 2 rows"):
            resplit_of(world, 3, 1, 2).own(torch.ones(2, 3), Held(0, 1))

    launch(3, body)


# ---- models

WIDTH, HIDDEN, TIME = 12, 8, 3
MIXERS = "blocks.*.mixer"


class Mixer(nn.Module):
    """Sorts and weighs its hidden features: across them, so that nobody splits it."""

    def __init__(self, dropout: float = 0.0, out: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, out), nn.Dropout(dropout)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.drop(self.down(self.drop(self.up(x).softmax(-1).sort(-1).values)))


class Net(nn.Module):
    """Two blocks with a mixer in the middle of each."""

    def __init__(self, mixer: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(Branch(mixer(), call) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean(1))


class Branch(nn.Module):
    """A residual branch: linears around a mixer, or the mixer alone."""

    def __init__(self, mixer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.mixer, self.call = mixer, call
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.call(self, x)


@dataclass(frozen=True)
class Vectors(Work):
    """Rows of three vectors, to classify."""

    rows: int = 11
    steps: int = 2
    loss: Callable[..., Any] = classification

    def batch(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        inputs = torch.randn(self.rows, TIME, WIDTH, generator=generator, dtype=torch.float64)
        return {"inputs": inputs, "targets": torch.randint(5, (self.rows,), generator=generator)}


def residual(branch: Any, x: Tensor) -> Tensor:
    """Features over x, given and made."""
    made = branch.mixer(x)
    return made[0] if isinstance(made, tuple) else made


def hidden(branch: Any, x: Tensor) -> Tensor:
    """Features over y."""
    return branch.down(branch.mixer(branch.up(x)).tanh())


def entering(branch: Any, x: Tensor) -> Tensor:
    """Given over x; what it makes, a transposed linear takes."""
    return branch.down(branch.mixer(x))


def flattened(branch: Any, x: Tensor) -> Tensor:
    """Tokens, as routers are given them."""
    return branch.mixer(x.flatten(0, 1)).unflatten(0, (len(x), -1))


def time_first(branch: Any, x: Tensor) -> Tensor:
    """Rows in the second dim."""
    return branch.mixer(x.transpose(0, 1)).transpose(0, 1)


def vectors(call: Callable[..., Tensor], mixer: Callable[[], nn.Module] = Mixer, **settings: Any) -> Vectors:
    torch.manual_seed(0)
    return Vectors(disturbed(Net(mixer, call).double()), **settings)


def plan(*paths: str, placement: Mapping[str, Any] | None = None, **grid: Any) -> dict[str, Any]:
    by_rows = {"by_rows": list(paths)} if paths else {}
    tensor = {"algorithm": "4d", **grid, **by_rows}
    return {"placement": {"precision": "fp64", "tensor": tensor, **(placement or {})}}


CUBE, X, Y = {"x": 2, "y": 2, "z": 2}, {"x": 3}, {"y": 3}


def dropping() -> Mixer:
    return Mixer(dropout=0.3)


@pytest.mark.parametrize("grid", [CUBE, X, Y], ids=str)
@pytest.mark.parametrize("call", [residual, hidden, entering])
def test_by_rows_equals_one_process(call: Callable[..., Tensor], grid: dict[str, Any]) -> None:
    """Loss, gradients, weights and every predicted byte, with dropout inside, 11 rows on 2 x 2 x 2 and 3 ranks."""
    work = vectors(call, dropping)
    for found in on_threads(work, plan(MIXERS, **grid)):
        assert_equal(found, serial(work))


@pytest.mark.parametrize("call", [flattened, time_first])
def test_rows_may_lie_elsewhere(call: Callable[..., Tensor]) -> None:
    work = vectors(call, Mixer if call is time_first else dropping)
    for found in on_threads(work, plan("*.mixer", x=2, y=2)):
        assert_equal(found, serial(work))


def test_modules_of_a_stock_model() -> None:
    """Attention, with a mask that is there or not, and the MLP: five rows on 2 x 2 ranks."""
    work = stock_work("llama", steps=1, rows=5)
    for found in on_threads(work, plan("*.self_attn", "*.mlp", x=2, y=2)):
        assert_equal(found, serial(work))


@pytest.mark.parametrize(
    "more",
    [
        {"placement": {"recompute": "full"}},
        {"placement": {"overlap": False}},
        {"schedule": {"name": "accumulate", "microbatches": 2}},
    ],
    ids=str,
)
def test_it_composes(more: dict[str, Any]) -> None:
    work = vectors(residual, dropping)
    settings = plan(MIXERS, placement=more.get("placement"), x=2, y=2)
    for found in on_threads(work, {**settings, **{key: more[key] for key in more if key != "placement"}}):
        assert_equal(found, serial(work))


def test_each_rank_computes_its_share() -> None:
    """11 rows on 6 ranks: 2, 2, 2, 2, 2, 1. What is alike in all blocks is treated alike."""
    work = vectors(residual)

    def rank(world: wire.World, settings: Mapping[str, Any]) -> list[list[int]]:
        run = parallelize(work.fresh(), work.loss, work.options, settings, world=world, example=work.batch(0))
        model: Any = run.model
        mixers = [block.mixer for block in model.blocks]
        for mixer in mixers:
            mixer.seen.clear()
        run.step(work.batch(0))
        return [mixer.seen for mixer in mixers]

    shared = wire.threads.launch(6, rank, plan("blocks.0.mixer", x=3, y=2))
    assert shared == [[[rows]] * 2 for rows in (2, 2, 2, 2, 2, 1)]


def test_the_meter_says_what_the_formula_says() -> None:
    """Two blocks of a mixer on the residual over x, m rows of T vectors a rank; its weights' gradients are sums."""
    x, y, m = 2, 2, 3
    work = vectors(residual, rows=m * x * y, steps=1)
    weights = 8 * (WIDTH * HIDDEN + HIDDEN + HIDDEN * WIDTH + WIDTH)
    block = 8 * m * TIME * WIDTH  # bytes of a rank's rows
    wanted = {
        Flow("x", "activation", "all_to_all"): Traffic(4, 4 * (x - 1) * block // x),
        Flow("y", "activation", "all_gather"): Traffic(2, 2 * (y - 1) * block),
        Flow("x", "activation-gradient", "all_to_all"): Traffic(4, 4 * (x - 1) * block // x),
        Flow("y", "activation-gradient", "all_gather"): Traffic(2, 2 * (y - 1) * block),
        Flow("x+y", "gradient", "all_reduce"): Traffic(8, 2 * 2 * (x * y - 1) * weights // (x * y)),
    }
    loss = Flow("y", "activation", "all_gather")  # has a line of its own there
    for found, whole in zip(*(on_threads(work, plan(*paths, x=x, y=y)) for paths in ((MIXERS,), ())), strict=True):
        measured = {flow: found.measured[flow] for flow in wanted}
        before, after = whole.measured[loss], measured[loss]
        measured[loss] = Traffic(after.calls - before.calls, after.bytes - before.bytes)
        assert measured == wanted


class Beside(Mixer):
    """Given by name, beside the rows: a mask of rows, a table that all rows read, and train, and numbers of rows."""

    def forward(self, x: Tensor, *, mask: Tensor, table: Tensor, number: Tensor) -> Any:  # type: ignore[override]
        made = super().forward(x + table)
        return {"made": made * mask, "twice": (2 * number,)}


class Asking(Net):
    """Hands it a trained table and a mask."""

    def __init__(self) -> None:
        super().__init__(Beside, self.ask)
        self.table = nn.Parameter(torch.zeros(TIME, WIDTH))

    def ask(self, branch: Any, x: Tensor) -> Tensor:
        mask = x.new_ones(*x.shape[:-1], 1).cumsum(0).remainder(2)
        number = torch.arange(len(x), device=x.device)
        found = branch.mixer(x, mask=mask, table=self.table, number=number)
        return found["made"] + found["twice"][0][:, None, None]


def test_what_comes_beside_the_rows() -> None:
    """Rows of a mask and of integers are dealt; of the table, every rank's rows give a part of the gradient."""
    torch.manual_seed(0)
    work = Vectors(disturbed(Asking().double()))
    grids: list[dict[str, Any]] = [{"x": 2, "y": 2}, Y]
    for grid in grids:
        for found in on_threads(work, plan(MIXERS, **grid)):
            assert_equal(found, serial(work))


# ---- what is refused


def refusals(work: Work, settings: Mapping[str, Any]) -> list[str]:
    """What every rank says."""

    def rank(world: wire.World) -> str:
        with pytest.raises(PlacementError) as caught:
            parallelize(work.fresh(), work.loss, work.options, settings, world=world, example=work.batch(0))
        return str(caught.value)

    return launch(Plan.of(settings).world, rank)


class Odd(nn.Module):
    """A mixer with something odd about rows."""

    kept: Tensor

    def __init__(self, odd: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.mixer, self.odd, self.norm = Mixer(), odd, nn.BatchNorm1d(TIME)
        self.instances = nn.InstanceNorm1d(TIME, track_running_stats=True)
        self.register_buffer("kept", torch.zeros(TIME, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.odd(self, self.mixer(x))


def _attended(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


def _averaged(odd: Any, x: Tensor) -> Tensor:
    odd.kept = 0.9 * odd.kept + 0.1 * x.detach()[:1].sum(0)
    return x


ODD: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "mean": (lambda odd, x: x - x.mean(0), r"mixer: mean does not make of one row"),
    "place": (lambda odd, x: x + x[0], r"mixer: __getitem__ does not make of one row"),
    "count": (lambda odd, x: x / len(x), r"mixer: (div|__truediv__) does not make of one row"),
    "numbered": (lambda odd, x: x + torch.arange(len(x), device=x.device)[:, None, None], r"mixer: arange does not"),
    "softmax": (lambda odd, x: x.softmax(0), r"mixer: softmax does not make of one row"),
    "attention": (
        lambda odd, x: _attended(x.transpose(0, 1)).transpose(0, 1),
        r"mixer: scaled_dot_product_attention does not make of one row",
    ),
    "roll": (lambda odd, x: x.roll(1, 0), r"mixer: roll does not make of one row"),
    "buffer": (_averaged, r"mixer\.kept: is changed by a forward"),
    "batch norm": (lambda odd, x: odd.norm(x), r"mixer\.norm\.\w+: is changed by a forward"),
    "instances": (lambda odd, x: odd.instances(x), r"mixer\.instances\.\w+: is changed by a forward"),
    "entries": (lambda odd, x: x + x[x[..., 0] > 0].sum(), r"mixer: \w+ does not make of one row"),
    "loss": (lambda odd, x: (x, x.square().sum()), r"mixer: gives a tensor without rows"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_not_row_by_row_is_named(name: str) -> None:
    odd, words = ODD[name]
    work = vectors(residual, lambda: Odd(odd))
    for said in refusals(work, plan(MIXERS, x=2, y=2)):
        assert re.search(words, said) and "by_rows" in said, said


def test_a_weight_used_outside_too_is_named() -> None:
    """There its gradient is of all rows on every rank."""
    work = vectors(lambda branch, x: branch.mixer(x) + 0.1 * branch.mixer.down.bias)
    assert all("down.bias: is used outside of its module too" in one for one in refusals(work, plan(MIXERS, x=2, y=2)))


def test_a_pattern_that_fits_nothing_is_named() -> None:
    said = refusals(vectors(residual), plan("blocks.*.mixre", x=2, y=2))
    assert all("by_rows: expected modules" in one and "'blocks.*.mixre' fits" in one for one in said)


def test_the_plan_wants_paths_and_an_algorithm_whose_rows_are_whole() -> None:
    with pytest.raises(PlanError, match=r"by_rows: expected a list of module paths .* found 'mixer'"):
        Plan.of({"placement": {"tensor": {"algorithm": "4d", "x": 2, "by_rows": "mixer"}}})
    with pytest.raises(PlanError, match="has no option 'by_rows'"):
        Plan.of({"placement": {"tensor": {"algorithm": "3d", "q": 2, "by_rows": ["mixer"]}}})
    found = Plan.of(plan(MIXERS, x=2, y=2))
    assert Plan.of(found.to_dict()) == found and found.placement.grid.by_rows == (MIXERS,)
