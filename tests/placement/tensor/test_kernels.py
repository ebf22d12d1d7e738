"""Kernels by trial: every way gives the product, the fastest is kept and told, and without trials nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.placement.tensor import kernels
from fourfold.placement.tensor.kernels import Choice, Kernels, site_of, ways
from fourfold.placement.tensor.product import product

from .grids import LIES, Linears, close, dense, draw, part, run, whole


def laid(matrix: Tensor, layout: str) -> Tensor:
    return matrix.contiguous() if layout == "N" else matrix.t().contiguous().t()


LAYOUTS = ("NN", "NT", "TN", "TT")


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_every_way_is_the_product(layouts: str) -> None:
    a, b = laid(draw(4, 5, seed=1), layouts[0]), laid(draw(5, 3, seed=2), layouts[1])
    assert site_of(a, b)[:4] == (4, 3, 5, layouts)
    assert len(set(ways(layouts))) == 5 and {way[:2] for way in ways(layouts)} == set(LAYOUTS)
    for way in ways(layouts):
        wide = torch.full((4, 7), torch.nan, dtype=a.dtype)
        kernels.run(way, a, b, wide[:, 2:5])
        close(wide[:, 2:5], a @ b, a @ b)
        assert wide[:, :2].isnan().all() and wide[:, 5:].isnan().all()


def test_the_fastest_way_is_kept_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"NT": 3.0, "TT": 4.0, "NN": 2.9, "TN": 5.0, "NT, transposed": 2.0}
    asked: list[str] = []

    def timed(way: str, *_: Any) -> float:
        asked.append(way)
        return seconds[way]

    monkeypatch.setattr(kernels, "_seconds", timed)
    mine, a, b = Kernels(), draw(4, 5, seed=1), draw(3, 5, seed=2).t()
    out = torch.empty(4, 3, dtype=a.dtype)
    for _ in range(2):
        mine(a, b, out)
    assert asked == list(ways("NT")), "tried once"
    (choice,) = mine.record()
    assert choice == Choice(site_of(a, b), "NT, transposed", 2.0, 3.0, tuple(seconds.items())) and choice.gain == 1.5
    close(out, a @ b, a @ b)

    seconds["NT, transposed"] = 2.95
    again = Kernels()
    again(a, b, out)
    assert again.record()[0].way == "NT", "three per cent are noise"
    fixed = Kernels([choice], timing=False)
    fixed(a, b, out)
    fixed(b.t(), a.t(), out.new_empty(3, 4))
    assert fixed.record() == [choice] and len(asked) == 2 * len(seconds), "nothing is timed where it must not be"


def test_a_real_trial_takes_real_times() -> None:
    mine, a, b = Kernels(), draw(4, 5, seed=1), draw(5, 3, seed=2)
    mine(a, b, torch.empty(4, 3, dtype=a.dtype))
    (choice,) = mine.record()
    assert choice.site.layouts == "NN" and choice.way in ways("NN")
    assert 0 < choice.seconds <= choice.plain and choice.gain >= 1


@pytest.mark.parametrize(("x", "y"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("rows", [None, 0])
@pytest.mark.parametrize("layout", ["out,in", "in,out"])
def test_products_with_chosen_kernels_are_those_of_one_process(x: int, y: int, rows: int | None, layout: str) -> None:
    parts = whole(rows=(12,))
    wanted = dense(parts)

    def body(world: wire.World) -> int:
        mesh, mine = wire.Mesh(world, {"x": x, "y": y}), Kernels()
        lies = {name: dict(LIES[name]) for name in wanted}
        for name in ("input", "output") if rows == 0 else ():
            lies[name] = {"y": 0, "x": -1}

        def linears(x: Tensor, weights: Any, biases: Any, transposed: bool) -> Any:
            contract, output = (mesh["y"], mesh["x"]) if transposed else (mesh["x"], mesh["y"])
            given = weights if layout == "out,in" else [weight.t() for weight in weights]
            about: dict[str, Any] = {"contract": contract, "output": output, "layout": layout, "rows": rows}
            return product(x, given, biases, **about, kernels=mine)

        layers: Linears = linears
        found = run({name: part(tensor, lies[name], mesh) for name, tensor in parts.items()}, layers)
        for name, tensor in wanted.items():
            close(found[name], part(tensor, lies[name], mesh), tensor)
        return len(mine.record())

    assert all(count >= 6 for count in wire.threads.launch(x * y, body)), "three products of either layer"


def test_nothing_is_tried_without_values() -> None:
    mine = Kernels()
    out = torch.empty(4, 3, device="meta")
    mine(torch.empty(4, 5, device="meta"), torch.empty(5, 3, device="meta"), out)
    assert mine.record() == []
