"""Megatron-LM's tensor parallelism: column linears, then row ones; two sums of activations a layer and direction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fourfold.placement.layout import Slot
from fourfold.recipes import _grid
from fourfold.recipes._claim import Claim
from fourfold.training.run import Run
from fourfold.wire import World
from fourfold.wire.threads import launch

RANKS = (2, 4)
ALGORITHMS = ("1d", "1d-sequence")
LAYERS = (2, 3)
"""Blocks of two models: what one layer sends is the difference, without what lies before and after the blocks."""


def claim() -> Claim:
    """Narayanan et al. 2021, section 3.2; Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.

    This is the tensor-parallel part of the first; what it says of pipelines is not claimed here. Sequence parallelism
    sends as much, as gathers and scatters; and what column linears read is gathered once more in backward, beside their
    input gradient, since each rank keeps its part alone.
    """
    hidden = _grid.SHAPE.width
    predicted: dict[str, float] = {}
    for ranks in RANKS:
        for algorithm in ALGORITHMS:
            about = f"{algorithm}, {ranks} ranks"
            predicted[f"{about}: gradients differ from one process"] = 0.0
            units = 8 if algorithm == "1d" else 10
            if algorithm == "1d":
                predicted[f"{about}: sums a layer, forward"] = 2.0
                predicted[f"{about}: sums a layer, backward"] = 2.0
            else:
                predicted[f"{about}: gathers and scatters a layer"] = 10.0
            predicted[f"{about}: bytes a layer sends"] = (
                units * (ranks - 1) / ranks * _grid.TOKENS * hidden * _grid.ITEM
            )
            predicted[f"{about}: a layer's matrices, elements"] = 12 * hidden**2 / ranks
    return Claim(
        system="Megatron-LM's tensor parallelism",
        paper="Narayanan et al. 2021, arXiv 2104.04473; Shoeybi et al. 2019; Korthikanti et al. 2022",
        statement="gradients equal one process's; a layer sums activations twice in forward and twice in backward, "
        "8(t-1)/t bsh elements in all (sequence parallelism: gathers and scatters, two again); a rank holds 1/t",
        predicted=predicted,
        measure=_measured,
        control=_control,
        off="gradients: nothing crosses between ranks; all else: plain replicas",
        tolerance=1e-9,
    )


Expected = Mapping[int, Mapping[str, Tensor]]
"""Gradients of one process, by the model's blocks."""


class Step(NamedTuple):
    """One rank's step.

    Attributes:
        error: of the gradients against one process.
        sums: all-reduces of activations, and of their gradients.
        parts: gathers and scatters of both.
        sent: bytes of all of these.
        held: elements of the last block's matrices.
    """

    error: float
    sums: tuple[int, int]
    parts: int
    sent: int
    held: int


def _expected() -> Expected:
    return {layers: _grid.serial(_grid.model(layers)).gradients for layers in LAYERS}


def _measured() -> dict[str, float]:
    figures: dict[str, float] = {}
    expected = _expected()
    for ranks in RANKS:
        for algorithm in ALGORITHMS:
            placement = {"tensor": {"algorithm": algorithm, "y": ranks}}
            figures |= _figures(f"{algorithm}, {ranks} ranks", launch(ranks, _steps, placement, expected)[0])
    return figures


def _control() -> dict[str, float]:
    figures: dict[str, float] = {}
    expected = _expected()
    for ranks in RANKS:
        replicas = launch(ranks, _steps, {"data": ranks}, expected)[0]
        for algorithm in ALGORITHMS:
            about = f"{algorithm}, {ranks} ranks"
            alone = _steps(_grid.deaf(ranks), {"tensor": {"algorithm": algorithm, "y": ranks}}, expected)
            figures |= _figures(
                about, [step._replace(error=deaf.error) for step, deaf in zip(replicas, alone, strict=True)]
            )
    return figures


def _figures(about: str, steps: list[Step]) -> dict[str, float]:
    few, many = steps
    return {
        f"{about}: gradients differ from one process": max(few.error, many.error),
        f"{about}: sums a layer, forward": many.sums[0] - few.sums[0],
        f"{about}: sums a layer, backward": many.sums[1] - few.sums[1],
        f"{about}: gathers and scatters a layer": many.parts - few.parts,
        f"{about}: bytes a layer sends": many.sent - few.sent,
        f"{about}: a layer's matrices, elements": many.held,
    }


def _steps(world: World, placement: Mapping[str, Any], expected: Expected) -> list[Step]:
    return [_step(world, placement, layers, expected[layers]) for layers in LAYERS]


def _step(world: World, placement: Mapping[str, Any], layers: int, expected: Mapping[str, Tensor]) -> Step:
    run = _grid.placed(world, placement, _grid.model(layers))
    run.step(_grid.batch())
    flows = [
        (flow, one) for flow, one in run.ledger.traffic(0).items() if flow.kind in ("activation", "activation-gradient")
    ]

    def calls(kind: str, *ops: str) -> int:
        return sum(one.calls for flow, one in flows if flow.op in ops and flow.kind == kind)

    return Step(
        error=_grid.error(run, expected),
        sums=(calls("activation", "all_reduce"), calls("activation-gradient", "all_reduce")),
        parts=sum(calls(kind, "all_gather", "reduce_scatter") for kind in ("activation", "activation-gradient")),
        sent=sum(one.bytes for _, one in flows),
        held=sum(slot.numel for slot in _matrices(run, f"blocks.{layers - 1}.")),
    )


def _matrices(run: Run, within: str) -> list[Slot]:
    slots = [slot for unit in run.placed.units for slot in unit.arena.layout.slots]
    return [slot for slot in slots if slot.name.startswith(within) and len(slot.block.logical) == 2]
