"""The bytes that tensor algorithms move, as formulas beside the code that moves them; a test holds them equal.

Two conventions, per rank and layer:

- *sent*: what the rank hands to the network, as the ledger counts it;
- *payload*: what a logger of collectives sees: the gathered output, the input of a scatter or a sum, the buffer of a
  broadcast or of a sum to one rank. An axis of one rank has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fourfold.ledger import Ledger
from fourfold.placement.tensor.panels import panels
from fourfold.wire import formulas
from fourfold.wire.formulas import shares
from fourfold.wire.ops import backward_kind


class Ranks(Protocol):
    """Ranks along an axis, and which of them counts: a `wire.Axis`, or the numbers alone (`Line`)."""

    @property
    def name(self) -> str:
        """Of the axis."""
        ...

    @property
    def size(self) -> int:
        """How many."""
        ...

    @property
    def index(self) -> int:
        """Which of them."""
        ...


@dataclass(frozen=True)
class Line:
    """Ranks along an axis, without a world."""

    name: str
    size: int
    index: int = 0


class Message(NamedTuple):
    """Calls of one collective.

    Attributes:
        axis, kind, op: as the ledger names them.
        sent: bytes that this rank hands to the network in all of them.
        payload: bytes that they are given or give, see above.
        calls: how many.
    """

    axis: str
    kind: str
    op: str
    sent: int
    payload: int
    calls: int = 1


@dataclass(frozen=True)
class Traffic:
    """What one layer moves in one micro-batch."""

    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.forward + other.forward, self.backward + other.backward)

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes sent in forward and in backward."""
        return sum(one.sent for one in self.forward), sum(one.sent for one in self.backward)

    @property
    def payload(self) -> tuple[int, int]:
        """Payload in forward and in backward (bytes)."""
        return sum(one.payload for one in self.forward), sum(one.payload for one in self.backward)

    def count(self, ledger: Ledger, forwards: int = 1, backwards: int = 1) -> None:
        """Into a ledger, so many forwards (recomputed ones included) and backwards."""
        for messages, times in ((self.forward, forwards), (self.backward, backwards)):
            for one in messages if times else ():
                ledger.send(one.axis, one.kind, one.op, times * one.sent, times * one.calls)


# ---- collectives


def _sum(axis: Ranks, counts: Sequence[int], itemsize: int, kind: str) -> Iterator[Message]:
    """All-reduces of tensors of so many elements."""
    if axis.size > 1:
        sent = sum(formulas.all_reduce(axis.size, count * itemsize, itemsize, axis.index) for count in counts)
        yield Message(axis.name, kind, "all_reduce", sent, sum(counts) * itemsize, len(counts))


def _gather(axis: Ranks, parts: Sequence[int], itemsize: int, kind: str, calls: int = 1) -> Iterator[Message]:
    """All-gathers that bring each rank's part (elements) to all, in so many chunks."""
    if axis.size > 1:
        sent = formulas.all_gather_of_parts([part * itemsize for part in parts], axis.index)
        yield Message(axis.name, kind, "all_gather", sent, sum(parts) * itemsize, calls)


def _scatter(axis: Ranks, parts: Sequence[int], itemsize: int, kind: str, calls: int = 1) -> Iterator[Message]:
    """Reduce-scatters that leave each rank its part (elements), in so many chunks."""
    if axis.size > 1:
        sent = formulas.reduce_scatter_of_parts([part * itemsize for part in parts], axis.index)
        yield Message(axis.name, kind, "reduce_scatter", sent, sum(parts) * itemsize, calls)


# ---- algorithms


def product(
    rows: int,
    features: int,
    outputs: int,
    *,
    contract: Ranks,
    output: Ranks,
    itemsize: int,
    sequence: bool = False,
    beside: int = 1,
    keep: bool = False,
    chunks: int = 1,
    trained: bool = True,
    wanted: bool = True,
    kind: str = "activation",
) -> Traffic:
    """Sibling linears by `product`: 4D, 1D, with `sequence` 1D with sequence parallelism and 3D.

    Args:
        rows: of the batch on the ranks of both axes together; with `sequence` along the dim that is cut.
        features, outputs: this rank's input features, and output features of all siblings.
        sequence, keep, chunks, kind: as `product` is called (`sequence`: with `rows`).
        beside: rows for each index along the dim that is cut.
        trained, wanted: some weight, and the input, have a gradient.
    """
    back = backward_kind(kind)
    if not sequence:
        pieces = [count * outputs for count in shares(rows * beside, chunks) if count]
        summed = [rows * beside * features] if wanted else []
        backward = _sum(output, summed, itemsize, back) if wanted else ()
        return Traffic(tuple(_sum(contract, pieces, itemsize, kind)), tuple(backward))
    before, after = ([count * beside for count in shares(rows, axis.size)] for axis in (output, contract))
    read, written = [count * features for count in before], [count * outputs for count in after]
    forward = [
        *_gather(output, read, itemsize, kind, chunks),
        *_scatter(contract, written, itemsize, kind, chunks if output.size == 1 else 1),
    ]
    backward = []
    if trained and not keep:
        backward += _gather(output, read, itemsize, kind)
    backward += _gather(contract, written, itemsize, back, chunks if wanted else 1)
    if wanted:
        backward += _scatter(output, read, itemsize, back)
    return Traffic(tuple(forward), tuple(backward))


def experts(
    tokens: int,
    choices: int,
    features: int,
    widths: tuple[int, int],
    *,
    outer: Ranks,
    inner: Ranks,
    itemsize: int,
    parts: Sequence[int] | None = None,
) -> Traffic:
    """Experts by `experts.ExpertsExecutor`, where all choices are computed: each token by as many experts.

    Args:
        tokens: that the experts compute on this rank.
        choices: experts of each.
        features: of a token on this rank, as experts read it.
        widths: output features of an expert's first layers here, and input features of its second ones.
        outer: axis of the tokens' features, unless these are whole.
        inner: axis of the features between the layers.
        parts: elements of the tokens that each rank of `inner` has, where they are gathered for the experts and their
            sums dealt out again; None: every rank has all.
    """
    forward, back = "activation", backward_kind("activation")
    scales = [tokens * choices]
    first = [*_sum(outer, [tokens * choices * widths[0]], itemsize, forward)]
    second = [*_sum(outer, [tokens * choices * widths[1]], itemsize, back)]
    second += [*_sum(inner, scales, itemsize, back), *_sum(outer, scales, itemsize, back)]
    if parts is None:
        around = [[*_sum(inner, [tokens * features], itemsize, kind)] for kind in (forward, back)]
    else:
        about = (parts, itemsize)
        around = [[*_gather(inner, *about, kind), *_scatter(inner, *about, kind)] for kind in (forward, back)]
    return Traffic((*around[0], *first), (*around[1], *second))


def summa(
    count: int,
    total: int,
    outputs: int,
    *,
    rows: Ranks,
    features: Ranks,
    itemsize: int,
    biases: int = 0,
    trained: int | None = None,
    wanted: bool = True,
    kind: str = "activation",
) -> Traffic:
    """Sibling linears by `summa`: 2D, and one layer of 2.5D.

    Args:
        count: rows M of the batch on this rank.
        total: input features of the whole layer.
        outputs: this rank's output features of all siblings.
        biases: of these, those that have a bias with a gradient.
        trained: of these, those whose weights have a gradient; None: all.
        wanted: the input has a gradient.
    """
    trained = outputs if trained is None else trained
    every = panels(total, rows.size, features.size)

    def broadcast(axis: Ranks, width: int, what: str) -> Iterator[Message]:
        sizes = [panel.width * width * itemsize for panel in every]
        sent = sum(formulas.broadcast(axis.size, nbytes, axis.index) for nbytes in sizes)
        yield Message(axis.name, what, "broadcast", sent, sum(sizes), len(sizes))

    def reduce(axis: Ranks, width: int, what: str, owners: Sequence[int]) -> Iterator[Message]:
        sizes = [panel.width * width * itemsize for panel in every]
        pairs = zip(sizes, owners, strict=True)
        sent = sum(formulas.reduce(axis.size, nbytes, axis.index, owner) for nbytes, owner in pairs)
        yield Message(axis.name, what, "reduce", sent, sum(sizes), len(sizes))

    forward = [*broadcast(features, count, kind), *broadcast(rows, outputs, "weight")]
    backward: list[Message] = []
    if wanted:
        backward += broadcast(rows, outputs, "weight")
        backward += reduce(features, count, backward_kind(kind), [panel.left for panel in every])
    if trained:
        backward += broadcast(features, count, kind)
        backward += reduce(rows, trained, "gradient", [panel.right for panel in every])
    if biases:
        backward += _sum(rows, [biases], itemsize, "gradient")
    sizes = {rows.name: rows.size, features.name: features.size}
    return Traffic(*(tuple(one for one in some if sizes[one.axis] > 1) for some in (forward, backward)))


def weights(elements: int, z: Ranks, *, itemsize: int, regather: bool = True, gradient_itemsize: int = 0) -> Traffic:
    """Local weights cut over z, as in 4D and 3D: gathered in forward (and again in backward), gradients scattered.

    What a block's arena really sends is padded to whole lines (`placement.traffic`): this is the published formula.

    Args:
        elements: of the local weights, whole over z.
        gradient_itemsize: of a gradient's element; 0: as of a weight's.
    """
    parts = shares(elements, z.size)
    gather = tuple(_gather(z, parts, itemsize, "weight"))
    scatter = tuple(_scatter(z, parts, gradient_itemsize or itemsize, "gradient"))
    return Traffic(gather, (gather if regather else ()) + scatter)


def replicas(elements: int, data: Ranks, *, itemsize: int) -> Traffic:
    """Gradients of so many local elements summed over replicas (or over the layers of 2.5D), once a step."""
    return Traffic((), tuple(_sum(data, [elements], itemsize, "gradient")))


def block(rows: int, hidden: int, x: int, y: int, z: int, *, itemsize: int) -> float:
    """Activation bytes that a rank sends for one transformer block in one micro-batch: 8eMh/(xyz)·[3(x−1) + (y−1)].

    Its linears are h → 3h, h → h, h → 4h, 4h → h, the first and third normal, the others transposed. Averaged over
    ranks where sizes do not divide; the norms' statistics are not in it.

    Args:
        rows: M, tokens of a replica's micro-batch, of all ranks of z together.
    """
    return 8 * itemsize * rows * hidden / (x * y * z) * (3 * (x - 1) + (y - 1))
