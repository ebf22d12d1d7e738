"""Optimus: SUMMA on q x q ranks, each of which holds 1/q^2 of every weight and of every activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fourfold.recipes import _plane
from fourfold.recipes._claim import Claim
from fourfold.recipes._plane import Outcome
from fourfold.wire import Mesh, World
from fourfold.wire.threads import launch

SIZES = (2, 3)


def claim() -> Claim:
    """Xu et al. 2021, section 3: a transformer block of SUMMA's linears (not yet a whole model)."""
    predicted: dict[str, float] = {}
    for q in SIZES:
        about = f"{q}x{q} ranks"
        predicted[f"{about}: output differs from one process"] = 0.0
        predicted[f"{about}: gradients differ from one process"] = 0.0
        predicted[f"{about}: largest part of a weight on a rank"] = 1 / q**2
        predicted[f"{about}: largest part of an activation on a rank"] = 1 / q**2
        predicted[f"{about}: elements that its linears send"] = sum(
            3 * (q - 1) / q**2 * (_plane.TOKENS * inputs + inputs * outputs)
            for inputs, outputs in _plane.GROUPS.values()
        )
    return Claim(
        system="Optimus",
        paper="Xu et al. 2021, arXiv 2104.05343",
        statement="forward and backward of a transformer block equal one process's; each rank holds 1/q^2 of every "
        "activation and weight; a linear sends 3(q-1)/q^2 (MK + KN) elements",
        predicted=predicted,
        measure=lambda: _figures(_measured),
        control=lambda: _figures(_control),
        off="every rank has all weights, and keeps the gradients of its own rows",
        tolerance=1e-9,
    )


def _figures(run: Callable[[int], Outcome]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for q in SIZES:
        found = run(q)
        figures |= {
            f"{q}x{q} ranks: output differs from one process": found.output,
            f"{q}x{q} ranks: gradients differ from one process": found.gradients,
            f"{q}x{q} ranks: largest part of a weight on a rank": found.weight,
            f"{q}x{q} ranks: largest part of an activation on a rank": found.activation,
            f"{q}x{q} ranks: elements that its linears send": found.sent,
        }
    return figures


def _measured(q: int) -> Outcome:
    return _plane.largest(launch(q * q, _rank, {"z": q, "y": q}))


def _control(q: int) -> Outcome:
    return _plane.largest(launch(q * q, _rank, {"data": q * q}))


def _rank(world: World, sizes: Mapping[str, int]) -> Outcome:
    return _plane.outcome(Mesh(world, sizes), deep=False)
