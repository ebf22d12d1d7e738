"""The bytes that a placement moves, as formulas beside the code that moves them.

All counts are bytes that one rank hands to the network in one optimizer step; a test holds them equal to what the
wire meters, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fourfold.ledger import Ledger
from fourfold.placement.layout import Layout
from fourfold.wire import formulas


@dataclass(frozen=True)
class Shipment:
    """What of a unit travels.

    Attributes:
        layout: its arena.
        last: it holds the last block: backward begins with it, so its weights are not gathered again.
        outer: it lies before or after the blocks: gathered once a micro-batch and kept through backward.
    """

    layout: Layout
    last: bool = False
    outer: bool = False


def weights(
    shipments: Sequence[Shipment], axis: int, *, shard: str, microbatches: int, itemsize: int, ledger: Ledger
) -> None:
    """Weight traffic over z in one step: gathers for use (parameters) or one refresh after the update."""
    for shipment in shipments:
        layout = shipment.layout
        if axis == 1 or shard == "none":
            continue
        if shard == "parameters":
            calls = microbatches * (1 if shipment.last or shipment.outer else 2)
            nbytes = formulas.all_gather(axis, layout.gathered * itemsize)
        else:
            calls = 1 if layout.trained else 0
            nbytes = formulas.all_gather(axis, layout.trained * layout.parts * itemsize)
        if calls and layout.size:
            ledger.send("z", "weight", "all_gather", calls * nbytes, calls)


def gradients(
    shipments: Sequence[Shipment],
    axis: int,
    *,
    shard: str,
    microbatches: int,
    payload: Callable[[int], int],
    ledger: Ledger,
) -> None:
    """Gradient traffic over z in one step: one scatter a micro-batch, or one a step where gradients are held.

    Args:
        payload: bytes that so many elements become on the wire.
    """
    for shipment in shipments:
        layout = shipment.layout
        if axis == 1 or not layout.trained:
            continue
        calls = 1 if shard == "optimizer" else microbatches
        nbytes = formulas.reduce_scatter(axis, payload(layout.trained) * layout.parts)
        ledger.send("z", "gradient", "reduce_scatter", calls * nbytes, calls)
