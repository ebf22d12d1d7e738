"""Tesseract: SUMMA on d layers of q x q ranks, each with its own rows and a copy of the weights."""

from __future__ import annotations

from collections.abc import Callable

from fourfold.recipes import _plane
from fourfold.recipes._claim import Claim
from fourfold.recipes._plane import Outcome
from fourfold.wire import Mesh, World
from fourfold.wire.threads import launch

SIZES = ((2, 2), (3, 2))
"""q and d."""


def claim() -> Claim:
    """Wang et al. 2021, section 3: a transformer block of SUMMA's linears (not yet a whole model).

    The elements are those of pipelined broadcasts and sums. The sum of gradients over the layers, without which the
    copies of the weights drift apart, is counted for all of the block's weights.
    """
    predicted: dict[str, float] = {}
    vectors = sum(outputs for _, outputs in _plane.GROUPS.values()) + 4 * _plane.HIDDEN
    weights = sum(inputs * outputs for inputs, outputs in _plane.GROUPS.values())
    for q, d in SIZES:
        about = f"{q}x{q}x{d} ranks"
        predicted[f"{about}: output differs from one process"] = 0.0
        predicted[f"{about}: gradients differ from one process"] = 0.0
        predicted[f"{about}: largest part of a weight on a rank"] = 1 / q**2
        predicted[f"{about}: largest part of an activation on a rank"] = 1 / (q**2 * d)
        predicted[f"{about}: elements that its linears send"] = sum(
            3 * (q - 1) / q**2 * (_plane.TOKENS * inputs / d + inputs * outputs)
            for inputs, outputs in _plane.GROUPS.values()
        )
        predicted[f"{about}: elements of the sum over layers"] = 2 * (d - 1) / d * (weights + vectors) / q**2
    return Claim(
        system="Tesseract",
        paper="Wang et al. 2021, arXiv 2105.14500",
        statement="forward and backward of a transformer block equal one process's; each rank holds 1/q^2 of every "
        "weight and 1/(q^2 d) of every activation; a linear sends 3(q-1)/q^2 (MK/d + KN) elements, and 2(d-1)/d KN/q^2 "
        "in the sum over layers",
        predicted=predicted,
        measure=lambda: _figures(_summed),
        control=lambda: _figures(_apart),
        off="gradients are not summed over the layers",
        tolerance=1e-9,
    )


def _figures(body: Callable[[World, int, int], Outcome]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for q, d in SIZES:
        found = _plane.largest(launch(q * q * d, body, q, d))
        about = f"{q}x{q}x{d} ranks"
        figures |= {
            f"{about}: output differs from one process": found.output,
            f"{about}: gradients differ from one process": found.gradients,
            f"{about}: largest part of a weight on a rank": found.weight,
            f"{about}: largest part of an activation on a rank": found.activation,
            f"{about}: elements that its linears send": found.sent,
            f"{about}: elements of the sum over layers": found.deep,
        }
    return figures


def _summed(world: World, q: int, d: int) -> Outcome:
    return _plane.outcome(Mesh(world, {"z": q, "y": q, "data": d}))


def _apart(world: World, q: int, d: int) -> Outcome:
    return _plane.outcome(Mesh(world, {"z": q, "y": q, "data": d}), deep=False)
