"""The bytes that a placement moves, as formulas beside the code that moves them.

All counts are bytes that one rank hands to the network in one optimizer step; a test holds them equal to what the
wire meters, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.anatomy import BatchNorm
from fourfold.ledger import Ledger
from fourfold.placement import batch_norm
from fourfold.placement.layout import Layout
from fourfold.wire import Axis, formulas


class Pass(NamedTuple):
    """A forward or a backward of one micro-batch through one stage.

    Attributes:
        forward: else a backward.
        stage: which.
        keeps: the rank's next pass is of the same kind and stage, and finds the gathered weights still there.
    """

    forward: bool
    stage: int = 0
    keeps: bool = False


def accumulated(microbatches: int) -> list[Pass]:
    """One micro-batch after the other, forward and backward, on one worker."""
    return [Pass(True), Pass(False)] * microbatches


@dataclass(frozen=True)
class Shipment:
    """What of a unit travels.

    Attributes:
        layout: its arena.
        last: it holds the last block: backward begins with it, so its weights are not gathered again.
        outer: it lies before or after the blocks: kept while a micro-batch is in flight.
        reached: backward comes to it; where it does not, nothing is gathered for it.
        stages: the pipeline stages that read it.
    """

    layout: Layout
    last: bool = False
    outer: bool = False
    reached: bool = True
    stages: frozenset[int] = frozenset({0})

    def gathers(self, passes: Iterable[Pass]) -> int:
        """How often it is gathered in a step of these passes, where it does not rest whole."""
        count, in_flight, here = 0, 0, False
        for one in passes:
            if one.stage not in self.stages:
                continue
            in_flight += 1 if one.forward else -1
            if not here and (one.forward or (self.reached and not self.outer)):
                count += 1
            here = one.keeps or (self.outer and in_flight > 0) or (self.last and one.forward)
        return count

    def leaves(self, passes: Iterable[Pass]) -> int:
        """How often its gradient leaves in a step of these passes, where it is not held until the end."""
        return sum(not one.forward and one.stage in self.stages for one in passes)


def weights(
    shipments: Sequence[Shipment], axis: int, *, shard: str, passes: Sequence[Pass], itemsize: int, ledger: Ledger
) -> None:
    """Weight traffic over z in one step: gathers for use (parameters) or one refresh after the update."""
    for shipment in shipments:
        layout = shipment.layout
        if axis == 1 or shard == "none":
            continue
        if shard == "parameters":
            calls = shipment.gathers(passes)
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
    passes: Sequence[Pass],
    payload: Callable[[int], int],
    ledger: Ledger,
) -> None:
    """Gradient traffic over z in one step: one scatter a backward, or one a step where gradients are held.

    Args:
        payload: bytes that so many elements become on the wire.
    """
    for shipment in shipments:
        layout = shipment.layout
        if axis == 1 or not layout.trained:
            continue
        calls = 1 if shard == "optimizer" else shipment.leaves(passes)
        nbytes = formulas.reduce_scatter(axis, payload(layout.trained) * layout.parts)
        ledger.send("z", "gradient", "reduce_scatter", calls * nbytes, calls)


class Exchange(NamedTuple):
    """What all ranks tell one another of one call of batch norm.

    Attributes:
        op: the collective.
        kind: of the traffic.
        nbytes: of the whole tensor.
        calls: in a micro-batch.
    """

    op: str
    kind: str
    nbytes: int
    calls: int


def exchanges(
    norms: Sequence[BatchNorm], ranks: int, *, recomputed: Iterable[str], trained: Iterable[str]
) -> Iterator[Exchange]:
    """The messages of one micro-batch's batch norms: a gather in forward, a sum in backward.

    Args:
        norms: the calls of one forward.
        ranks: that share the rows of a micro-batch.
        recomputed: paths of the blocks whose forward runs again in backward, with all of its messages, if backward
            comes there: to a weight, or to what lies before.
        trained: names of the weights that have gradients.
    """
    goals = [*trained, *(norm.module for norm in norms if norm.learned)]
    twice = [path for path in recomputed if any(_within(goal, path) for goal in goals)]
    for norm in norms if ranks > 1 else ():
        calls = 2 if any(_within(norm.module, path) for path in twice) else 1
        yield Exchange("all_gather", "activation", ranks * batch_norm.message(norm.channels) * 8, calls)
        if norm.learned:
            yield Exchange("all_reduce", "activation-gradient", 2 * norm.channels * 8, 1)


def _within(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def statistics(sent: Iterable[Exchange], axis: Axis, *, microbatches: int, ledger: Ledger) -> None:
    """Statistics of batch norms over all ranks in one step."""
    for one in sent:
        if one.op == "all_gather":
            nbytes = formulas.all_gather(axis.size, one.nbytes)
        else:
            nbytes = formulas.all_reduce(axis.size, one.nbytes, 8, axis.index)
        calls = microbatches * one.calls
        ledger.send(axis.name, one.kind, one.op, calls * nbytes, calls)
