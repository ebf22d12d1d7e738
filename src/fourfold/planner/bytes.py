"""The bytes of a plan on every axis, by the formulas that live beside the code that moves them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fourfold.ledger import Ledger
from fourfold.placement import seats, traffic
from fourfold.plan import Events, Plan
from fourfold.planner.memory import Parcel
from fourfold.planner.tape import Tape


@dataclass(frozen=True)
class Seat:
    """A rank's place on an axis: all that a formula asks of one."""

    name: str
    size: int
    index: int


def count(
    ledger: Ledger,
    plan: Plan,
    parcels: Sequence[Parcel],
    exchanges: Sequence[traffic.Exchange],
    microbatches: int,
    passes: Sequence[traffic.Pass] | None = None,
    stages: Sequence[frozenset[int]] = (),
    ends: bool = True,
) -> None:
    """Add what one rank (the first) hands to the network in a step but over x and y (see `features`).

    Weights and gradients over z, gradients over data, statistics of batch norms over both.

    Control traffic (the few numbers that ranks tell each other in a step, where they do not ride behind a gradient) is
    not in it.

    Args:
        passes: of a pipeline's rank, in their order; None: one micro-batch after the other.
        stages: of a pipeline's rank, which of its stages read each parcel.
        ends: the model ends on this rank.
    """
    last = max((place for parcel in parcels for place in parcel.places), default=None) if ends else None
    shipments = [
        traffic.Shipment(
            parcel.layout,
            last=last in parcel.places,
            outer=not parcel.places,
            reached=parcel.reached,
            stages=stages[number] if stages else frozenset({0}),
        )
        for number, parcel in enumerate(parcels)
        if parcel.layout.parts == plan.placement.z
    ]
    placement = plan.placement
    chosen = plan.wire.gradient
    coded = chosen.module.Codec(chosen.options) if chosen else None

    def payload(elements: int) -> int:
        return coded.wire_bytes(elements, parcels[0].master) if coded else elements * parcels[0].message

    passes = traffic.accumulated(microbatches) if passes is None else passes
    about: dict[str, Any] = {"shard": placement.shard, "passes": passes, "ledger": ledger}
    traffic.weights(shipments, placement.z, itemsize=parcels[0].message, **about)
    traffic.gradients(shipments, placement.z, payload=payload, **about)
    everyone = cast("Any", Seat("z+data", placement.parts, 0))
    traffic.statistics(exchanges, everyone, microbatches=microbatches, ledger=ledger)
    seat = cast("Any", Seat("data", placement.axes()["data"], 0))
    rule = plan.sync.module.Rule(plan.sync.options, seat, Events(), plan.replica_codec())
    sizes = [parcel.layout.trained for parcel in parcels if parcel.layout.trained]
    if sizes and plan.tallies_ride():
        sizes[0] += seats.room(placement.parts)
    rule.forecast(ledger, sizes, parcels[0].master)


def features(ledger: Ledger, plan: Plan, tapes: Iterable[Tape]) -> None:
    """Add what the first rank hands to the network over x and y in a step.

    Args:
        tapes: of every micro-batch.
    """
    sizes = plan.placement.axes()
    for tape in tapes:
        for segment in tape.segments:
            for event in segment.events:
                if event.kind == "send":
                    message = tape.messages[event.number]
                    ledger.send(message.axis, message.kind, message.op, message.sent(sizes))
