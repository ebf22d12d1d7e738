"""Optimus: SUMMA on q x q ranks, each of which holds 1/q^2 of every weight and of every activation."""

from __future__ import annotations

from collections.abc import Callable

from fourfold.recipes import _grid, _plane
from fourfold.recipes._claim import Claim
from fourfold.recipes._plane import Expected, Outcome
from fourfold.wire.threads import launch

SIZES = (2, 3)


def claim() -> Claim:
    """Xu et al. 2021, section 3. A transformer is trained; parts and elements are those of its blocks.

    Elements are those of pipelined broadcasts and sums, by which a rank passes on what it gets.
    """
    predicted: dict[str, float] = {}
    for q in SIZES:
        about = f"{q}x{q} ranks"
        predicted[f"{about}: loss differs from one process"] = 0.0
        predicted[f"{about}: gradients differ from one process"] = 0.0
        predicted[f"{about}: largest part of any weight"] = 1 / q**2
        predicted[f"{about}: largest part of any activation"] = 1 / q**2
        predicted[f"{about}: elements that a layer's linears send"] = sum(
            3 * (q - 1) / q**2 * (_plane.TOKENS * inputs + inputs * outputs) for inputs, outputs in _plane.linears(q)
        )
    return Claim(
        system="Optimus",
        paper="Xu et al. 2021, arXiv 2104.05343",
        statement="loss and gradients equal one process's; each rank holds 1/q^2 of every activation and weight of a "
        "block; a linear sends 3(q-1)/q^2 (MK + KN) elements",
        predicted=predicted,
        measure=lambda: _figures(_measured),
        control=lambda: _figures(_control),
        off="every rank has all weights, and keeps the gradients of its own rows",
        tolerance=1e-9,
    )


def _figures(run: Callable[[int, Expected], Outcome]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for q in SIZES:
        about, found = f"{q}x{q} ranks", run(q, _plane.expected(q))
        figures |= {
            f"{about}: loss differs from one process": found.loss,
            f"{about}: gradients differ from one process": found.gradients,
            f"{about}: largest part of any weight": found.weight,
            f"{about}: largest part of any activation": found.activation,
            f"{about}: elements that a layer's linears send": found.sent,
        }
    return figures


def _measured(q: int, expected: Expected) -> Outcome:
    plan = {"tensor": {"algorithm": "2d", "q": q}}
    return _plane.largest(launch(q * q, _plane.outcome, q, plan, expected))


def _control(q: int, expected: Expected) -> Outcome:
    return _plane.outcome(_grid.alone(), q, {}, expected, q * q)
