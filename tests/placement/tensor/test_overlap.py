"""What travels while matrices are multiplied: collectives under way at each product, with overlap and without."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from fourfold import wire
from fourfold.placement.tensor import kernels, siblings
from fourfold.placement.tensor.product import product
from fourfold.placement.tensor.summa import summa

from .grids import draw, part

Seen = list[tuple[str, int]]


def body(world: wire.World, sizes: Mapping[str, int], options: Mapping[str, Any], about: dict[int, wire.Mesh]) -> None:
    mesh = about[world.rank] = wire.Mesh(world, sizes)
    lies = {"x": 1, **({"y": 0} if "rows" in options else {})}
    x = part(draw(12, 6, seed=1), lies, mesh).requires_grad_()
    weight = part(draw(12, 6, seed=2), {"x": 1, "y": 0}, mesh).requires_grad_()
    (out,) = product(x, [weight], [None], contract=mesh["x"], output=mesh["y"], **options)
    out.sum().backward()


def this_rank() -> int:
    """Which rank's thread this is."""
    return int(threading.current_thread().name.split()[1])


def under_way(
    monkeypatch: pytest.MonkeyPatch, sizes: Mapping[str, int], options: Mapping[str, Any]
) -> list[tuple[str, int]]:
    """For every multiplication of rank 0, in order: what is computed, and how many collectives are under way."""
    meshes: dict[int, wire.Mesh] = {}
    seen: list[tuple[str, int, int]] = []
    names = {"outputs": "out", "input_gradient": "dx", "weight_gradients": "dw"}

    def watch(name: str) -> None:
        inner = getattr(siblings, name)

        def watched(*args: Any) -> None:
            mesh = meshes[rank := this_rank()]
            seen.append((names[name], mesh["x"].under_way + mesh["y"].under_way, rank))
            inner(*args)

        monkeypatch.setattr(siblings, name, watched)

    for name in names:
        watch(name)
    wire.threads.launch(sizes.get("x", 1) * sizes.get("y", 1), body, sizes, options, meshes)
    return [(what, count) for what, count, rank in seen if rank == 0]


@pytest.mark.parametrize(
    ("sizes", "options", "wanted"),
    [
        # The input's gradient is summed over y while the weight's is computed.
        ({"y": 3}, {}, [("out", 0), ("dx", 0), ("dw", 1)]),
        ({"y": 3}, {"overlap": False}, [("out", 0), ("dx", 0), ("dw", 0)]),
        # Nothing to sum: the weight's gradient comes first.
        ({"x": 3}, {}, [("out", 0), ("dw", 0), ("dx", 0)]),
        # The input is gathered again behind its own gradient, whose rows are scattered behind the weight's.
        ({"y": 3}, {"rows": 0}, [("out", 0), ("dx", 1), ("dw", 1)]),
        ({"y": 3}, {"rows": 0, "overlap": False}, [("out", 0), ("dx", 0), ("dw", 0)]),
        ({"y": 3}, {"rows": 0, "keep": True}, [("out", 0), ("dx", 0), ("dw", 1)]),
        # Chunks: a sum is under way from the second on.
        ({"x": 3}, {"chunks": 3}, [("out", 0), ("out", 1), ("out", 2), ("dw", 0), ("dx", 0)]),
        # Chunks of a gather: the own rows meanwhile; those of two others when each chunk is there.
        ({"y": 3}, {"rows": 0, "chunks": 2}, [("out", n) for n in (2, 1, 1, 0, 0)] + [("dx", 1), ("dw", 1)]),
        # Chunks of a scatter, each the rows of three ranks.
        (
            {"x": 3},
            {"rows": 0, "chunks": 2},
            [("out", n) for n in (0, 0, 0, 1, 1, 1)] + [("dx", n) for n in (2, 1, 1, 0, 0)] + [("dw", 0)],
        ),
    ],
)
def test_collectives_under_way_at_each_multiplication(
    monkeypatch: pytest.MonkeyPatch, sizes: Mapping[str, int], options: Mapping[str, Any], wanted: Seen
) -> None:
    assert under_way(monkeypatch, sizes, options) == wanted


@pytest.mark.parametrize(("size", "calls"), [(2, []), (3, ["all_reduce"])])
def test_the_second_round_of_a_sum_is_begun_when_half_of_the_gradients_are_computed(
    monkeypatch: pytest.MonkeyPatch, size: int, calls: list[str]
) -> None:
    seen: list[tuple[int, str]] = []
    proceed = wire.Work.proceed

    def watched(work: wire.Work) -> None:
        seen.append((this_rank(), work.op))
        assert not work.done
        proceed(work)
        assert not work.done

    monkeypatch.setattr(wire.Work, "proceed", watched)
    wire.threads.launch(size, body, {"y": size}, {}, {})
    assert [op for rank, op in seen if rank == 0] == calls


@pytest.mark.parametrize(("overlap", "wanted"), [(True, [2, 2, 0, 2, 2, 4, 4, 2, 2]), (False, [0] * 9)])
def test_summa_sends_panels_while_it_multiplies_others(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, wanted: list[int]
) -> None:
    """The next panel's two broadcasts, but in the last step; in backward the last one's two sums, but in the first."""
    meshes: dict[int, wire.Mesh] = {}
    seen: list[tuple[int, int]] = []
    inner = kernels.multiply

    def watched(*args: Any) -> None:
        mesh = meshes[rank := this_rank()]
        seen.append((rank, mesh["x"].under_way + mesh["y"].under_way))
        inner(*args)

    monkeypatch.setattr(kernels, "multiply", watched)

    def grid(world: wire.World) -> None:
        mesh = meshes[world.rank] = wire.Mesh(world, {"x": 3, "y": 3})
        x, weight = draw(4, 2, seed=1).requires_grad_(), draw(3, 2, seed=2).requires_grad_()
        summa(x, [weight], [None], rows=mesh["x"], features=mesh["y"], overlap=overlap)[0].sum().backward()

    wire.threads.launch(9, grid)
    assert [count for rank, count in seen if rank == 0] == wanted
