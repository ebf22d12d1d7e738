"""Tesseract: SUMMA on d layers of q x q ranks, each with its own rows and a copy of the weights."""

from __future__ import annotations

from collections.abc import Callable

from fourfold.recipes import _plane
from fourfold.recipes._claim import Claim
from fourfold.recipes._plane import Expected, Outcome
from fourfold.wire.threads import launch

SIZES = ((2, 2),)
"""q and d."""


def claim() -> Claim:
    """Wang et al. 2021, section 3. A transformer is trained; parts and elements are those of its blocks.

    Elements are those of pipelined broadcasts and sums. Gradients are summed over the layers once a step, those of
    biases and norms with them.
    """
    predicted: dict[str, float] = {}
    for q, d in SIZES:
        about, linears = f"{q}x{q}x{d} ranks", _plane.linears(q)
        weights = sum(inputs * outputs for inputs, outputs in linears)
        vectors = sum(outputs for _, outputs in linears) + 4 * _plane.SHAPES[q].width
        predicted[f"{about}: loss differs from one process"] = 0.0
        predicted[f"{about}: gradients differ from one process"] = 0.0
        predicted[f"{about}: largest part of any weight"] = 1 / q**2
        predicted[f"{about}: largest part of any activation"] = 1 / (q**2 * d)
        predicted[f"{about}: elements that a layer's linears send"] = sum(
            3 * (q - 1) / q**2 * (_plane.TOKENS * inputs / d + inputs * outputs) for inputs, outputs in linears
        )
        predicted[f"{about}: elements of the sum over layers"] = 2 * (d - 1) / d * (weights + vectors) / q**2
    return Claim(
        system="Tesseract",
        paper="Wang et al. 2021, arXiv 2105.14500",
        statement="loss and gradients equal one process's; each rank holds 1/q^2 of every weight and 1/(q^2 d) of "
        "every activation of a block; a linear sends 3(q-1)/q^2 (MK/d + KN) elements, and 2(d-1)/d KN/q^2 in the sum "
        "over the layers",
        predicted=predicted,
        measure=lambda: _figures(_measured),
        control=lambda: _figures(_control),
        off="the layers hear nothing of each other: gradients are not summed over them",
        tolerance=1e-9,
    )


def _figures(run: Callable[[int, int, Expected], Outcome]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for q, d in SIZES:
        about, found = f"{q}x{q}x{d} ranks", run(q, d, _plane.expected(q))
        figures |= {
            f"{about}: loss differs from one process": found.loss,
            f"{about}: gradients differ from one process": found.gradients,
            f"{about}: largest part of any weight": found.weight,
            f"{about}: largest part of any activation": found.activation,
            f"{about}: elements that a layer's linears send": found.sent,
            f"{about}: elements of the sum over layers": found.deep,
        }
    return figures


def _measured(q: int, d: int, expected: Expected) -> Outcome:
    plan = {"tensor": {"algorithm": "2.5d", "q": q, "d": d}}
    return _plane.largest(launch(q * q * d, _plane.outcome, q, plan, expected))


def _control(q: int, d: int, expected: Expected) -> Outcome:
    plan = {"tensor": {"algorithm": "2d", "q": q}}
    return _plane.largest(launch(q * q, _plane.outcome, q, plan, expected, d))
