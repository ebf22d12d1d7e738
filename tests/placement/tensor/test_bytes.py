"""What the linears of every algorithm send is what the formulas say, exactly; and those say what was published.

The integers are those of a virtual-rank simulation of the algorithms as AxoNN, Megatron-LM and Colossal-AI run them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.ledger import Ledger
from fourfold.placement.tensor import traffic
from fourfold.placement.tensor.product import product
from fourfold.placement.tensor.summa import summa
from fourfold.placement.tensor.traffic import Line, Traffic
from fourfold.wire.dry import dry_mesh

from .grids import draw, part

M, K, N = 32, 16, 48
EIGHT = 8
"""Bytes of a float64."""


def metered(mesh: wire.Mesh, layer: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[int, int]:
    """Elements that this rank sends in forward, and in backward."""
    outs = layer(x.requires_grad_())
    forward = mesh.ledger.sent()
    torch.cat(outs, -1).sum().backward()
    return forward // EIGHT, (mesh.ledger.sent() - forward) // EIGHT


# ---- the published integers

ONE_D = [
    ({"y": 8}, False, False, (0, 896)),
    ({"y": 8}, True, False, (2688, 0)),
    ({"y": 8}, False, True, (448, 896)),
    ({"y": 8}, True, True, (1344, 1344)),
]


@pytest.mark.parametrize(("sizes", "transposed", "sequence", "elements"), ONE_D)
def test_1d_column_and_row_with_and_without_sequence_parallelism(
    sizes: Mapping[str, int], transposed: bool, sequence: bool, elements: tuple[int, int]
) -> None:
    def body(world: wire.World) -> tuple[int, int]:
        mesh = wire.Mesh(world, sizes)
        contract, output = (mesh["y"], mesh["x"]) if transposed else (mesh["x"], mesh["y"])
        weight = torch.ones(N // output.size, K // contract.size, dtype=torch.float64, requires_grad=True)
        x = torch.ones(M // output.size if sequence else M, K // contract.size, dtype=torch.float64)
        about: dict[str, Any] = {"contract": contract, "output": output, "rows": 0 if sequence else None}
        found = metered(mesh, lambda x: product(x, [weight], [None], **about), x)
        formula = traffic.product(
            *(M, K // contract.size, N // output.size),
            contract=contract,
            output=output,
            itemsize=1,
            sequence=sequence,
        )
        assert formula.sent == found
        return found

    assert wire.threads.launch(8, body) == [elements] * 8


def test_2d_and_2_5d() -> None:
    for layers, forward, backward, depth in ((1, 320, 640, 0), (2, 256, 512, 192)):

        def body(world: wire.World, layers: int = layers) -> tuple[int, int, int]:
            mesh = wire.Mesh(world, {"z": 2, "y": 2, "data": layers})
            weight = torch.ones(N // 2, K // 2, dtype=torch.float64, requires_grad=True)
            x = torch.ones(M // 2 // layers, K // 2, dtype=torch.float64)
            layer = traffic.summa(M // 2 // layers, K, N // 2, rows=mesh["z"], features=mesh["y"], itemsize=1)
            found = metered(mesh, lambda x: summa(x, [weight], [None], rows=mesh["z"], features=mesh["y"]), x)
            assert layer.sent == found
            payload = M * K // layers // 2 + K * N // 2
            assert layer.payload == (payload, 2 * payload)
            before = mesh.ledger.sent()
            assert weight.grad is not None
            mesh["data"].all_reduce(weight.grad, "gradient").wait()
            deep = traffic.replicas(weight.numel(), mesh["data"], itemsize=1)
            assert deep.sent == (0, (mesh.ledger.sent() - before) // EIGHT)
            assert deep.payload == (0, K * N // 4 if layers > 1 else 0)
            return *found, deep.sent[1]

        assert wire.threads.launch(4 * layers, body) == [(forward, backward, depth)] * 4 * layers


@pytest.mark.parametrize(
    ("sequence", "elements", "payload"),
    [(False, (480, 320), (576, 512)), (True, (352, 352), (704, 704))],
    ids=["4d", "3d"],
)
def test_4d_and_3d(sequence: bool, elements: tuple[int, int], payload: tuple[int, int]) -> None:
    """The depth axis of the original is z here: weights gathered in forward and, in 4D, again; gradients scattered."""

    def body(world: wire.World) -> tuple[int, int]:
        mesh = wire.Mesh(world, {"x": 2, "y": 2, "z": 2})
        z, shard = mesh["z"], torch.ones(N // 2 * K // 2 // 2, dtype=torch.float64)
        weight = torch.empty(N // 2, K // 2, dtype=torch.float64)
        z.all_gather(weight, shard, "weight").wait()
        x = torch.ones(M // 2 // (2 if sequence else 1), K // 2, dtype=torch.float64)
        about: dict[str, Any] = {"contract": mesh["x"], "output": mesh["y"]}
        options: dict[str, Any] = {"rows": 0, "keep": True} if sequence else {}
        found = metered(mesh, lambda x: product(x, [weight.requires_grad_()], [None], **about, **options), x)
        before = mesh.ledger.sent()
        if not sequence:
            z.all_gather(torch.empty_like(weight), shard, "weight").wait()
        assert weight.grad is not None
        z.reduce_scatter(shard, weight.grad, "gradient").wait()
        total = found[0], found[1] + (mesh.ledger.sent() - before) // EIGHT
        formula = traffic.weights(weight.numel(), z, itemsize=1, regather=not sequence) + traffic.product(
            *(M // 2, K // 2, N // 2), **about, itemsize=1, sequence=sequence, keep=sequence
        )
        assert formula.sent == total
        assert formula.payload == payload
        return total

    assert wire.threads.launch(8, body) == [elements] * 8


def test_the_closed_forms_on_all_grids() -> None:
    for x, y, z in ((1, 1, 1), (2, 1, 4), (1, 4, 2), (4, 2, 1), (2, 2, 2)):
        along: dict[str, Any] = {"contract": Line("x", x), "output": Line("y", y)}
        layer = traffic.product(M // z, K // x, N // y, **along, itemsize=2)
        layer += traffic.weights(K * N // (x * y), Line("z", z), itemsize=2)
        held = (z - 1) * K * N // (x * y * z)
        assert layer.sent == (
            2 * (held + 2 * (x - 1) * M * N // (x * y * z)),
            2 * (2 * held + 2 * (y - 1) * M * K // (x * y * z)),
        )


# ---- the block


@pytest.mark.parametrize(("x", "y", "z"), [(1, 8, 1), (2, 2, 2), (4, 2, 1), (1, 1, 4), (2, 4, 4)])
def test_a_transformer_block_adds_up_to_the_block_formula(x: int, y: int, z: int) -> None:
    tokens, hidden = 64, 32
    layers = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    sent = 0
    for number, (inputs, outputs) in enumerate(layers):
        contract, output = (Line("y", y), Line("x", x)) if number % 2 else (Line("x", x), Line("y", y))
        about: dict[str, Any] = {"contract": contract, "output": output}
        one = traffic.product(tokens // z, inputs // contract.size, outputs // output.size, **about, itemsize=2)
        sent += sum(one.sent)
    assert sent == traffic.block(tokens, hidden, x, y, z, itemsize=2)


def test_the_best_grid_of_64_ranks_is_4_by_16() -> None:
    grids = [(x, 64 // x) for x in (1, 2, 4, 8, 16, 32, 64)]
    assert min(grids, key=lambda grid: traffic.block(64, 64, *grid, 1, itemsize=2)) == (4, 16)
    assert traffic.block(64, 64, 1, 8, 1, itemsize=2) == 8 * 2 * 64 * 64 * 7 / 8


# ---- uneven sizes, exactly, message by message


def flows(ledger: Ledger) -> dict[Any, tuple[int, int]]:
    return {flow: (one.calls, one.bytes) for flow, one in ledger.traffic().items()}


def agrees(mesh: wire.Mesh, formula: Traffic, seen: Mapping[int, int]) -> None:
    forecast = Ledger()
    formula.count(forecast)
    assert flows(mesh.ledger) == flows(forecast)
    assert sum(formula.payload) == seen[mesh.world.rank]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Mapping[int, int]:
    """The payload of every rank, as one sees it who looks at the collectives only."""
    found = Counter[int]()

    def watch(name: str, which: int) -> None:
        inner = getattr(wire.Axis, name)

        def watched(axis: wire.Axis, *args: Any, **options: Any) -> wire.Work:
            if axis.size > 1:
                found[axis.world.rank] += args[which].nbytes
            return inner(axis, *args, **options)

        monkeypatch.setattr(wire.Axis, name, watched)

    for name, which in (("all_reduce", 0), ("all_gather", 0), ("reduce_scatter", 1), ("broadcast", 0), ("reduce", 0)):
        watch(name, which)
    return found


@pytest.mark.parametrize(("x", "y"), [(3, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    ("trained", "wanted", "keep"),
    [(True, True, False), (True, True, True), (False, True, False), (True, False, False)],
)
def test_uneven_products_to_the_byte(
    seen: Mapping[int, int], x: int, y: int, sequence: bool, chunks: int, trained: bool, wanted: bool, keep: bool
) -> None:
    count, inputs, outputs, beside = 7, 5, (11, 4), 2

    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"x": x, "y": y})
        read = part(draw(count, beside, inputs, seed=1), {"x": -1, **({"y": 0} if sequence else {})}, mesh)
        weights = [part(draw(n, inputs, seed=n), {"x": 1, "y": 0}, mesh).requires_grad_(trained) for n in outputs]
        about: dict[str, Any] = {"contract": mesh["x"], "output": mesh["y"], "keep": keep, "chunks": chunks}
        rows: dict[str, Any] = {"rows": 0, "total": count} if sequence else {}
        outs = product(read.requires_grad_(wanted), weights, [None, None], **about, **rows)
        torch.cat(outs, -1).sum().backward()
        formula = traffic.product(
            *(count, read.shape[-1], sum(len(weight) for weight in weights)),
            **{
                **about,
                "itemsize": EIGHT,
                "sequence": sequence,
                "beside": beside,
                "trained": trained,
                "wanted": wanted,
            },
        )
        agrees(mesh, formula, seen)

    wire.threads.launch(x * y, body)


@pytest.mark.parametrize(("rows", "features"), [(2, 2), (3, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize(("trained", "wanted"), [(True, True), (True, False), (False, True)])
def test_uneven_summa_to_the_byte(
    seen: Mapping[int, int], rows: int, features: int, trained: bool, wanted: bool
) -> None:
    count, inputs, outputs = 7, 5, 11

    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"z": rows, "y": features})
        x = part(draw(count, inputs, seed=1), {"z": 0, "y": 1}, mesh).requires_grad_(wanted)
        weight = part(draw(outputs, inputs, seed=2), {"z": 1, "y": 0}, mesh).requires_grad_(trained)
        bias = part(draw(outputs, seed=3), {"y": 0}, mesh).requires_grad_()
        (out,) = summa(x, [weight], [bias], rows=mesh["z"], features=mesh["y"], total=inputs)
        out.sum().backward()
        formula = traffic.summa(
            *(len(x), inputs, len(weight)),
            rows=mesh["z"],
            features=mesh["y"],
            itemsize=EIGHT,
            biases=len(bias),
            trained=len(weight) if trained else 0,
            wanted=wanted,
        )
        agrees(mesh, formula, seen)

    wire.threads.launch(rows * features, body)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_dry_rank_counts_what_it_would_send(sequence: bool, device: str) -> None:
    sizes = {"x": 2, "y": 3}

    def step(mesh: wire.Mesh, device: str) -> dict[Any, tuple[int, int]]:
        x = part(draw(7, 5, seed=1), {"x": 1, **({"y": 0} if sequence else {})}, mesh).to(device).requires_grad_()
        weight = part(draw(11, 5, seed=2), {"x": 1, "y": 0}, mesh).to(device).requires_grad_()
        rows: dict[str, Any] = {"rows": 0, "total": 7} if sequence else {}
        product(x, [weight], [None], contract=mesh["x"], output=mesh["y"], chunks=2, **rows)[0].sum().backward()
        x = part(draw(7, 5, seed=1), {"x": 0, "y": 1}, mesh).to(device).requires_grad_()
        about: dict[str, Any] = {"rows": mesh["x"], "features": mesh["y"], "total": 5}
        summa(x, [weight], [None], **about)[0].sum().backward()
        return flows(mesh.ledger)

    real = wire.threads.launch(6, lambda world: step(wire.Mesh(world, sizes), "cpu"))
    assert [step(dry_mesh(sizes, rank), device) for rank in range(6)] == real


def test_recomputed_forwards_are_counted_by_the_forward() -> None:
    layer = traffic.product(4, 4, 4, contract=Line("x", 2), output=Line("y", 2), itemsize=1)
    once, twice = Ledger(), Ledger()
    layer.count(once)
    layer.count(twice, forwards=2)
    assert twice.sent(axis="x") == 2 * once.sent(axis="x") and twice.sent(axis="y") == once.sent(axis="y") > 0
