"""Whatever composes with a grid, in all pairs: the results of one process, and every byte predicted."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.anatomy import survey
from fourfold.models import convnet
from fourfold.training.losses.classification import classification
from fourfold.training.optimizer import OptimizerOptions
from plain import SGD, Outcome, Work, assert_equal, disturbed, on_threads, serial, worst

from .grouped import Sizes, decoder, decoding

ADAMW = OptimizerOptions(name="adamw", lr=0.02, eps=1e-4, weight_decay=0.1, clip=0.5, clip_norm=math.inf)
"""A key's bias has a gradient of exactly zero, so all of it is rounding, and AdamW divides rounding by `eps`."""

# ---- the choices


def _without(*parts: str) -> Callable[[nn.Module], None]:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in parts))

    return freeze


SIZES = {
    "one shared head": Sizes(heads=4, shared=1, tied=True),
    "two": Sizes(heads=6, shared=2, bias=False),
    "five": Sizes(heads=5, shared=5, width=13, hidden=19),
}
FROZEN = {
    "": _without(),
    "table": _without("tokens"),
    "norms": _without("norm"),
    "first": _without("tokens", "blocks.0"),
    "last": _without("blocks.1", "norm", "head"),
}
CHOICES: dict[str, Sequence[Any]] = {
    "sizes": tuple(SIZES),
    "frozen": tuple(FROZEN),
    "grid": ({"x": 2}, {"x": 3}, {"y": 2}, {"x": 2, "y": 2}, {"y": 4}),
    "rows": ({}, {"data": 2}, {"z": 2, "shard": "optimizer"}, {"z": 2, "shard": "gradients"}, {"z": 2}),
    "microbatches": (1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "optimizer": (SGD, ADAMW, replace(SGD, clip=None)),
    "bucket": (None, 0),
    "overlap": (True, False),
    "chunks": (1, 3),
    "kernels": ("plain", "tuned"),
}


def pairs(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A few settings in which every two values of every two choices meet: a row begins with two that have not."""
    names, values = list(choices), [range(len(each)) for each in choices.values()]
    ends = itertools.combinations(range(len(names)), 2)
    missing = {((a, i), (b, j)) for a, b in ends for i in values[a] for j in values[b]}
    rows: list[dict[int, int]] = []

    def met(row: Mapping[int, int]) -> set[Any]:
        return missing & set(itertools.combinations(sorted(row.items()), 2))

    while missing:
        row = dict(min(missing))
        for at in sorted(set(range(len(names))) - row.keys(), key=lambda at: -len(values[at])):
            turn = len(rows)
            row[at] = max(values[at], key=lambda value: (len(met({**row, at: value})), -((value + turn) % 7)))
        missing -= met(row)
        rows.append(row)
    return [{name: choices[name][row[at]] for at, name in enumerate(names)} for row in rows]


ROWS = pairs(CHOICES)


def plan(row: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of a row of choices."""
    about = {name: row[name] for name in ("recompute", "bucket", "overlap", "chunks", "kernels")}
    grid = {"algorithm": "4d", **row["grid"]}
    placement = {"precision": "fp64", "tensor": grid, **row["rows"], **about}
    if "z" in row["rows"]:
        placement |= {"shard": row["rows"].get("shard", "parameters")}
    return {"placement": placement, "schedule": {"microbatches": row["microbatches"]}}


def work(row: Mapping[str, Any]) -> Work:
    """What is trained in a row of choices."""
    return decoding(SIZES[row["sizes"]], options=row["optimizer"], prepare=FROZEN[row["frozen"]])


def name(row: Mapping[str, Any]) -> str:
    """For people."""
    optimizer = f"{row['optimizer'].name} {row['optimizer'].clip_norm if row['optimizer'].clip else 'unclipped'}"
    shown = {**row, "optimizer": optimizer, "overlap": "" if row["overlap"] else "waits"}
    return " ".join(str(value) for value in shown.values() if value not in ({}, "", None))


def listed(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Every third row is in the suite; the others are for `make test-long`."""
    later = (pytest.mark.long,)
    return [pytest.param(row, id=name(row), marks=later if number % 3 else ()) for number, row in enumerate(rows)]


@pytest.mark.parametrize("row", listed(ROWS))
def test_all_pairs_of_choices(row: dict[str, Any]) -> None:
    ours = work(row)
    expected = serial(ours)
    for found in on_threads(ours, plan(row)):
        assert_equal(found, expected)


def test_every_pair_meets() -> None:
    for one, other in itertools.combinations(CHOICES, 2):
        met = [(row[one], row[other]) for row in ROWS]
        assert all(pair in met for pair in itertools.product(CHOICES[one], CHOICES[other]))


# ---- heads


@pytest.mark.parametrize(
    ("heads", "shared", "grid"),
    [(3, 3, {"y": 2}), (3, 3, {"x": 2, "y": 3}), (6, 3, {"y": 6}), (7, 1, {"y": 3}), (10, 2, {"y": 4})],
    ids=str,
)
def test_heads_that_do_not_divide(heads: int, shared: int, grid: dict[str, int]) -> None:
    """Above, equal to and below the key-value heads; queries of a shared head are dealt unevenly among its copies."""
    ours = decoding(Sizes(heads=heads, shared=shared))
    expected = serial(ours)
    for found in on_threads(ours, {"placement": {"precision": "fp64", "tensor": {"algorithm": "4d", **grid}}}):
        assert_equal(found, expected)


@pytest.mark.parametrize(("heads", "y"), [(4, 2), (6, 3), (7, 4)])
def test_a_single_key_value_head_is_copied_and_its_gradient_summed(heads: int, y: int) -> None:
    """Multi-query attention: queries are dealt over y, every rank has the one key-value head, nothing runs whole."""
    ours = decoding(Sizes(heads=heads, shared=1))
    anatomy = survey(ours.fresh(), ours.loss, ours.batch(0))
    assert anatomy.whole == {}
    assert {linear.unit_out for name, linear in anatomy.linears.items() if ".key." in name or ".value." in name} == {4}
    for found in on_threads(ours, {"placement": {"precision": "fp64", "tensor": {"algorithm": "4d", "y": y}}}):
        assert_equal(found, serial(ours))


# ---- bits


@pytest.mark.parametrize(
    ("placement", "options"),
    [
        ({"tensor": {"algorithm": "4d", "x": 3}}, SGD),
        ({"tensor": {"algorithm": "4d", "y": 3}, "recompute": "full"}, ADAMW),
        ({"tensor": {"algorithm": "4d", "x": 3, "z": 3}}, ADAMW),
        ({"tensor": {"algorithm": "4d", "y": 3}, "z": 3, "shard": "optimizer"}, SGD),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_overlap(placement: dict[str, Any], options: OptimizerOptions) -> None:
    """Three ranks and more of x, y and z: with two, a sum has one order only."""
    ours = decoding(Sizes(heads=3, shared=3), options=options, rows=7)
    runs = [
        on_threads(
            ours,
            {"placement": {"precision": "fp64", **placement, "overlap": overlap}, "schedule": {"microbatches": 2}},
        )[0]
        for overlap in (True, False)
    ]
    one, other = runs
    assert one.losses == other.losses and one.norms == other.norms
    assert all(torch.equal(one.weights[name], value) for name, value in other.weights.items())
    assert all(torch.equal(one.gradients[name], value) for name, value in other.gradients.items())


# ---- element types and codecs


def off(found: Outcome, expected: Outcome) -> float:
    """How far weights moved from where they should have gone, relative to how far they went."""
    plain = dict(decoder().named_parameters())
    moved = max(float((value - plain[name]).abs().max()) for name, value in expected.weights.items())
    return max(float((found.weights[name] - value).abs().max()) for name, value in expected.weights.items()) / moved


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", 0.1)], ids=str)
@pytest.mark.parametrize("rows", [{}, {"z": 2, "shard": "parameters"}, {"data": 2}], ids=str)
def test_narrow_types_stay_near_the_plan_without_a_grid(precision: str, bound: float, rows: dict[str, Any]) -> None:
    """Sums over x and y add roundings, no more: the same plan without the grid is as far from float64."""
    ours = decoding(replace(Sizes(), dropout=0.0), options=replace(SGD, lr=0.1))
    single = replace(ours, model=copy.deepcopy(ours.model).float())
    placement = {"precision": precision, **rows}
    (without, *_) = on_threads(single, {"placement": placement})
    grid = {"tensor": {"algorithm": "4d", "x": 2, "y": 2}}
    for found in on_threads(single, {"placement": {**placement, **grid}}):
        assert off(found, without) <= bound
        assert found.measured == found.predicted


@pytest.mark.parametrize("rows", [{"data": 2}, {"z": 2, "shard": "gradients"}], ids=str)
def test_a_codec_of_gradients_crosses_rows_and_leaves_features_alone(rows: dict[str, Any]) -> None:
    ours = decoding()
    placement = {"precision": "fp64", "tensor": {"algorithm": "4d", "x": 2, "y": 2}, **rows}
    plain, coded = (
        on_threads(ours, {"placement": placement, **wire_})[0] for wire_ in ({}, {"wire": {"gradient": "bf16"}})
    )
    for outcome in (plain, coded):
        assert outcome.measured == outcome.predicted
    assert off(coded, plain) <= 2**-6
    for flow, traffic in plain.measured.items():
        if flow.axis in ("x", "y"):
            assert coded.measured[flow] == traffic
    assert worst(coded.gradients, serial(ours).gradients) <= 0.1


# ---- models without attention


@dataclass(frozen=True)
class Pictures(Work):
    """Random images and their classes."""

    rows: int = 5
    steps: int = 2
    loss: Callable[..., Any] = classification

    def batch(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        images = torch.randn(self.rows, 3, 4, 4, generator=generator, dtype=torch.float64)
        return {"inputs": images, "targets": torch.randint(5, (self.rows,), generator=generator)}


def perceptron() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(48, 11), nn.ReLU(), nn.Dropout(0.2), nn.Linear(11, 9), nn.LayerNorm(9)),
        *(nn.Linear(9, 13), nn.GELU(), nn.Linear(13, 5)),
    )


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "a linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 5)),
    "a perceptron": perceptron,
    "a convnet": lambda: convnet.ConvNet(convnet.Config(classes=5, width=12, blocks=2, groups=6)),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("grid", [{"x": 2, "y": 2}, {"y": 4}, {"x": 3, "z": 2}], ids=str)
def test_models_of_linears_and_convolutions(name: str, grid: dict[str, int]) -> None:
    """Channels of a group norm are dealt in whole groups."""
    torch.manual_seed(0)
    ours = Pictures(disturbed(PLAIN[name]().double()))
    expected = serial(ours)
    for found in on_threads(ours, {"placement": {"precision": "fp64", "tensor": {"algorithm": "4d", **grid}}}):
        assert_equal(found, expected)
