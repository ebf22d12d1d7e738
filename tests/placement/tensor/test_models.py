"""Whole models on grids whose x and y cut features: losses, gradients and weights are those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from plain import Outcome, Work, assert_equal, forgive_routing, gpt, on_threads, serial, stock_work

NAMES = ("llama", "qwen3", "mistral", "mixtral", "gpt2", "opt", "bert", "vit")
GRIDS = ({"x": 2, "y": 2, "z": 2}, {"y": 4}, {"x": 3, "y": 2})
"""All axes at once; more ranks than key-value heads; sizes that do not divide."""


def plan(**tensor: int) -> dict[str, Any]:
    return {"placement": {"precision": "fp64", "tensor": {"algorithm": "4d", **tensor}}}


@functools.cache
def work(name: str) -> Work:
    return stock_work(name, steps=5)


@functools.cache
def alone(name: str) -> Outcome:
    return serial(work(name))


def _pairs() -> list[Any]:
    """Every model on every grid; the suite has all on the first grid and each of the others with some of them."""
    kept = {1: ("llama", "qwen3", "mixtral"), 2: ("gpt2", "bert", "vit")}
    return [
        pytest.param(name, grid, marks=[] if at == 0 or name in kept[at] else [pytest.mark.long], id=f"{name} {grid}")
        for at, grid in enumerate(GRIDS)
        for name in NAMES
    ]


@pytest.mark.parametrize(("name", "tensor"), _pairs())
def test_stock_models_on_grids_equal_one_process(name: str, tensor: dict[str, int]) -> None:
    for outcome in on_threads(work(name), plan(**tensor)):
        if name == "mixtral":
            forgive_routing(outcome)
        assert_equal(outcome, alone(name))


@pytest.mark.parametrize("tensor", ({"x": 2}, {"y": 2}, {"x": 2, "y": 3}), ids=str)
def test_our_gpt_on_grids_equals_one_process(tensor: dict[str, int]) -> None:
    ours = Work(gpt(0.1), steps=3)
    for outcome in on_threads(ours, plan(**tensor)):
        assert_equal(outcome, serial(ours))


@pytest.mark.parametrize(("name", "y"), [("llama", 2), ("gpt2", 3), ("opt", 3), ("bert", 2), ("vit", 3)])
def test_time_over_y_between_linears_equals_one_process(name: str, y: int) -> None:
    """Sequence parallelism, where the steps of time divide and where they do not."""
    settings = {"placement": {"precision": "fp64", "tensor": {"algorithm": "1d-sequence", "y": y}}}
    for outcome in on_threads(work(name), settings):
        assert_equal(outcome, alone(name))


@pytest.mark.parametrize("name", ("qwen3", "gpt2", "opt", "bert", "vit"))
def test_rows_over_the_idle_axis_equal_one_process(name: str) -> None:
    """The 3D algorithm."""
    even = stock_work(name, steps=2, rows=4)
    settings = {"placement": {"precision": "fp64", "tensor": {"algorithm": "3d", "q": 2}}}
    for outcome in on_threads(even, settings):
        assert_equal(outcome, serial(even))


@pytest.mark.parametrize("tensor", ({"algorithm": "2d", "q": 2}, {"algorithm": "2.5d", "q": 2, "d": 2}), ids=str)
@pytest.mark.parametrize("name", ("qwen3", "gpt2", "vit"))
def test_products_of_panels_equal_one_process(name: str, tensor: dict[str, Any]) -> None:
    """Optimus and Tesseract, with a table that is the head's weight too, and with one that is not."""
    for outcome in on_threads(work(name), {"placement": {"precision": "fp64", "tensor": tensor}}):
        assert_equal(outcome, alone(name))
