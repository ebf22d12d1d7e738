"""The choice of a matrix product's kernel by trial (Singh et al., SC 2024, tune theirs so).

Libraries are not equally fast for all layouts of operands: on some devices the product of a weight gradient (a
transposed left operand) takes several times that of its forward. A copy of an operand in the other layout, or the
transposed product, gives the same numbers. So the first product of each shape is run in every way, on the real tensors,
copies included in the time; from then on in the fastest one.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.placement.tensor.siblings import Multiply, multiply

TRIALS = 3
"""Runs of every way, after one that does not count; the fastest is its time."""
MARGIN = 0.95
"""Another way must take less than this share of the time of the operands as they lie: noise must not choose."""

_numbers = itertools.count()
_kernels: weakref.WeakValueDictionary[str, Kernels] = weakref.WeakValueDictionary()


class Site(NamedTuple):
    """A product out [m, n] = a [m, k] b [k, n] as a library sees it.

    Attributes:
        m, n, k: its shape.
        layouts: of a and b: N where rows are contiguous, T where columns are.
        dtype, device: "float32", "cpu".
    """

    m: int
    n: int
    k: int
    layouts: str
    dtype: str
    device: str


class Choice(NamedTuple):
    """What was chosen for a site.

    Attributes:
        site: where.
        way: layouts that are multiplied; "NT, transposed" if the product of the transposed operands is.
        seconds: that it took.
        plain: seconds that the operands took as they lay.
        tried: every way that was timed, and its seconds.
    """

    site: Site
    way: str
    seconds: float
    plain: float
    tried: tuple[tuple[str, float], ...] = ()

    @property
    def gain(self) -> float:
        """Times faster than the operands as they lay."""
        return self.plain / self.seconds if self.seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The plain mapping that a journal holds."""
        site = {"rows": self.site.m, "columns": self.site.n, "depth": self.site.k, "layouts": self.site.layouts}
        about = {"dtype": self.site.dtype, "device": self.site.device}
        return {**site, **about, "way": self.way, "seconds": self.seconds, "plain": self.plain, "gain": self.gain}


class Kernels:
    """Runs matrix products in the fastest of the ways that were tried. Ranks choose for themselves.

    The ways of a product add up in different orders, so a choice by time does not promise bits from run to run: give
    the record of an earlier run, and say that nothing is to be timed, for a run with the same choices.

    Args:
        choices: made before.
        timing: try what has no choice yet; else it is multiplied as it lies.

    Attributes:
        key: unique in this process, for registered ops.
        chosen: by site.
    """

    def __init__(self, choices: Iterable[Choice] = (), *, timing: bool = True) -> None:
        self.key = f"kernels@{next(_numbers)}"
        self.timing = timing
        self.chosen: dict[Site, Choice] = {choice.site: choice for choice in choices}
        _kernels[self.key] = self

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, start: Tensor | None = None) -> None:
        """See `siblings.Multiply`."""
        if out.is_meta or type(out) is not Tensor or not out.numel():
            return multiply(a, b, out, start)
        site = site_of(a, b)
        choice = self.chosen.get(site)
        if choice is None and self.timing:
            choice = self.chosen[site] = _tried(site, a, b, out if start is None else torch.empty_like(out))
        run(site.layouts if choice is None else choice.way, a, b, out, start)

    def record(self) -> list[Choice]:
        """Every choice, those that gained most first."""
        return sorted(self.chosen.values(), key=lambda choice: -choice.gain)


def of(key: str) -> Multiply:
    """The kernels with this key; torch's own product for the empty one."""
    return _kernels[key] if key else multiply


def site_of(a: Tensor, b: Tensor) -> Site:
    """Where this product belongs."""
    layouts = _layout(a) + _layout(b)
    return Site(len(a), b.shape[1], len(b), layouts, str(a.dtype).removeprefix("torch."), a.device.type)


def ways(layouts: str) -> tuple[str, ...]:
    """All ways to run a product whose operands lie so; as they lie first."""
    left, right = layouts
    return (
        layouts,
        _OTHER[left] + right,
        left + _OTHER[right],
        _OTHER[left] + _OTHER[right],
        f"{layouts}, transposed",
    )


def run(way: str, a: Tensor, b: Tensor, out: Tensor, start: Tensor | None = None) -> None:
    """`siblings.multiply`, operands copied into the layouts of `way`."""
    layouts, _, transposed = way.partition(", ")
    a, b = _laid(a, layouts[0]), _laid(b, layouts[1])
    if transposed:
        other = out.new_empty(out.shape[1], out.shape[0])
        multiply(b.t(), a.t(), other)
        if start is None:
            out.copy_(other.t())
        else:
            torch.add(other.t(), start, out=out)
    else:
        multiply(a, b, out, start)


_OTHER = {"N": "T", "T": "N"}


def _layout(matrix: Tensor) -> str:
    return "N" if matrix.stride(1) == 1 else "T"


def _laid(matrix: Tensor, layout: str) -> Tensor:
    if _layout(matrix) == layout:
        return matrix
    return matrix.contiguous() if layout == "N" else matrix.t().contiguous().t()


def _tried(site: Site, a: Tensor, b: Tensor, out: Tensor) -> Choice:
    times = {way: _seconds(way, a, b, out) for way in ways(site.layouts)}
    plain = times[site.layouts]
    fastest = min(times, key=lambda way: times[way])
    way = fastest if times[fastest] < MARGIN * plain else site.layouts
    return Choice(site, way, times[way], plain, tuple(times.items()))


def _seconds(way: str, a: Tensor, b: Tensor, out: Tensor) -> float:
    def settled() -> float:
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        return time.perf_counter()

    run(way, a, b, out)
    times = []
    for _ in range(TRIALS):
        began = settled()
        run(way, a, b, out)
        times.append(settled() - began)
    return min(times)
