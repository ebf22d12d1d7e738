"""Every collective of a step on a grid x * y * z * data, by the ring formulas: one list that gives bytes and time.

A linear of K inputs and N outputs on M tokens of a data replica (Singh et al. 2023, arXiv 2305.13525; elements that one
rank sends): its weight is gathered over z, (z-1)/z KN/(xy), in forward and for backward; its output is summed over x,
2(x-1)/x MN/(zy); its input gradient over y, 2(y-1)/y MK/(zx); its weight gradient is scattered over z and, once a step,
summed over data. A transposed linear swaps x and y. What the formula leaves out has lines of its own: the statistics of
norms on split features, the sum behind the embedding, the head, and the loss on a split vocabulary.

Where sizes do not divide, ranks send different amounts: `at` says whose are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from fourfold.placement.layout import Layout
from fourfold.placement.rows import share
from fourfold.placement.tensor import traffic
from fourfold.placement.tensor.traffic import Line
from fourfold.planner.network import Linear, Network
from fourfold.wire import formulas

AXES: tuple[str, ...] = ("x", "y", "z", "data")
LOSS_VALUES = 2
"""What a token's loss takes over a split vocabulary: log-sum-exp of a rank's part, and the label's logit."""


class Factors(NamedTuple):
    """Sizes of the axes x, y, z and data, fastest first; or a rank's place on them."""

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1

    @property
    def world(self) -> int:
        """Ranks."""
        return prod(self)

    def stride(self, axis: str) -> int:
        """Ranks between neighbours on an axis."""
        return prod(self[: AXES.index(axis)])

    def settings(self) -> dict[str, Any]:
        """What a plan says under `placement`."""
        return {"tensor": {"algorithm": "4d", "x": self.x, "y": self.y, "z": self.z}, "data": self.data}

    def __str__(self) -> str:
        return f"x {self.x} y {self.y} z {self.z} data {self.data}"


@dataclass(frozen=True)
class Job:
    """What a step does.

    Attributes:
        rows: of the global batch.
        microbatches: into which a step is cut.
        itemsize: bytes of activations, and of weights and their gradients on the way over z.
        gradient: bytes of an element that is summed over data.
        statistic: bytes of a norm's or a loss's value.
        recompute: "none", "selective" (the attention core; sends nothing) or "full": forward's sums once more.
        shard: what stays cut over z between uses: "parameters", "gradients" or "optimizer".
        kept: blocks, from the last, whose gathered weights stay until backward, which begins there.
        logits: what the loss does with them: "cut", a cross-entropy on the split vocabulary, or "whole": they are
            gathered over y, for a loss of any kind.
        flash: attention keeps no scores.
        overlap: gathers, scatters and input-gradient sums run beside compute.
    """

    rows: int
    microbatches: int = 1
    itemsize: int = 2
    gradient: int = 4
    statistic: int = 4
    recompute: str = "none"
    shard: str = "parameters"
    kept: int = 1
    logits: str = "cut"
    flash: bool = True
    overlap: bool = True


@dataclass(frozen=True)
class Toll:
    """One collective, and how often a step has it.

    Attributes:
        where: of the network: a linear's name, "block", "norms", "embedding", "head", "loss", "outer".
        when: "forward", "again" (forward's, in recomputation), "backward" or "step".
        kind: of the traffic, as the ledger calls it.
        elements: of the whole tensor.
        size, index: of the rank's group, and its place in it.
        times: in a step.
        unit: elements that stay together when the tensor is dealt to ranks.
    """

    where: str
    when: str
    axis: str
    op: str
    kind: str
    elements: int
    itemsize: int
    size: int
    index: int
    times: int
    unit: int = 1

    @property
    def nbytes(self) -> int:
        """The whole tensor."""
        return self.elements * self.itemsize

    @property
    def sent(self) -> int:
        """Bytes that this rank hands to the network in a step."""
        if self.op == "all_reduce":
            return self.times * formulas.all_reduce(self.size, self.nbytes, self.itemsize, self.index)
        if self.unit > 1:
            own = formulas.share(self.elements // self.unit, self.size, self.index) * self.unit * self.itemsize
            return self.times * (self.nbytes - own if self.op == "all_to_all" else (self.size - 1) * own)
        return self.times * formulas.all_gather(self.size, self.nbytes)  # a scatter sends as much


class Tolls:
    """The collectives of one rank's step.

    Args:
        at: coordinates of the rank.
    """

    def __init__(self, network: Network, grid: Factors, job: Job, at: Factors | None = None):
        self.network, self.grid, self.job = network, grid, job
        self.at = at or Factors(0, 0, 0, 0)
        self.sizes = dict(zip(AXES, grid, strict=True))
        self.places = dict(zip(AXES, self.at, strict=True))

    @cached_property
    def listed(self) -> tuple[Toll, ...]:
        """All of them; groups of one exchange nothing and are left out."""
        found = [*self._weights(), *self._gradients()]
        for tokens, times in self.tokens.items():
            found += self._activations(tokens, times)
        return tuple(toll for toll in found if toll.size > 1 and toll.elements and toll.times)

    def sent(self) -> dict[str, int]:
        """Bytes that the rank sends in a step, by axis."""
        return {axis: sum(toll.sent for toll in self.listed if toll.axis == axis) for axis in AXES}

    @cached_property
    def tokens(self) -> Counter[int]:
        """Tokens of this rank's micro-batches, and how many have so many. Who has no rows computes one all the same."""
        part, parts = self.at.z + self.grid.z * self.at.data, self.grid.z * self.grid.data
        sizes = (
            len(share(self.job.rows, self.job.microbatches, parts, number, part))
            for number in range(self.job.microbatches)
        )
        return Counter(max(1, rows) * self.network.sequence for rows in sizes)

    @cached_property
    def block(self) -> Layout:
        """One block's weights, cut over z."""
        return self._layout(self.network.block_shapes(self.sizes, self.places))

    @cached_property
    def outer(self) -> Layout:
        """The weights before and after the blocks, cut over z."""
        return self._layout(self.network.outer_shapes(self.sizes, self.places))

    def _layout(self, shapes: list[tuple[int, ...]]) -> Layout:
        return Layout.of([(str(number), shape, "all") for number, shape in enumerate(shapes)], self.grid.z)

    def _toll(
        self, where: str, when: str, axis: str, op: str, kind: str, elements: int, itemsize: int, times: int
    ) -> Toll:
        size, index = self.sizes[axis], self.places[axis]
        return Toll(where, when, axis, op, kind, elements, itemsize, size, index, times)

    def _weights(self) -> Iterator[Toll]:
        """Gathers over z: for forward and for backward, or once after the update."""
        job, blocks = self.job, self.network.blocks
        whole = self.block.gathered, self.outer.gathered
        if job.shard == "parameters":
            again = max(0, blocks - job.kept) * job.microbatches
            calls = [("block", "forward", blocks * job.microbatches), ("block", "backward", again)]
            calls.append(("outer", "forward", job.microbatches))
        else:
            calls = [("block", "step", blocks), ("outer", "step", 1)]
        for where, when, times in calls:
            elements = whole[where == "outer"]
            yield self._toll(where, when, "z", "all_gather", "weight", elements, job.itemsize, times)

    def _gradients(self) -> Iterator[Toll]:
        """Scatters over z (once a step where whole gradients are held), and one sum over data."""
        job = self.job
        calls = 1 if job.shard == "optimizer" else job.microbatches
        for where, layout, count in (("block", self.block, self.network.blocks), ("outer", self.outer, 1)):
            about = "gradient", layout.gathered, job.itemsize, calls * count
            yield self._toll(where, "backward", "z", "reduce_scatter", *about)
            yield self._toll(where, "step", "data", "all_reduce", "gradient", layout.size, job.gradient, count)
        copies = self._copied()
        if copies:
            toll = self._toll("copies", "step", "y", "all_reduce", "gradient", copies, job.gradient, 1)
            yield replace(toll, size=self.grid.y // self.network.kv_heads, index=0)

    def _copied(self) -> int:
        """Gradient elements of a rank's shard whose heads other ranks of y hold as well: summed once a step."""
        if not 0 < self.network.kv_heads < self.grid.y:
            return 0
        found = 0
        for linear in self.network.linears:
            inputs, _ = linear.local(self.sizes, self.places)
            copied = sum(band.width for band in linear.outputs if band.parts < self.grid.y)
            found += copied * (inputs + linear.bias) // self.grid.z
        return found * self.network.blocks

    def _activations(self, tokens: int, times: int) -> Iterator[Toll]:
        """Sums over x and y of `times` micro-batches of so many tokens."""
        network, job = self.network, self.job
        for linear in network.linears:
            yield from self._linear(linear, tokens, times * network.blocks)
        norms, values = times * network.blocks * network.norms, network.statistics * tokens
        yield from self._forward("norms", "x", values, job.statistic, norms)
        yield self._back("norms", "x", values, job.statistic, norms)
        if not network.vocabulary:
            return
        yield from self._ends(tokens, times)

    def _ends(self, tokens: int, times: int) -> Iterator[Toll]:
        """Embedding, last norm, head and loss."""
        network, job = self.network, self.job
        columns = network.vocabulary_linear.local(self.sizes, self.places)[0]
        looked_up = (tokens, *((network.sequence,) if network.positions_cut else ()))
        for places in looked_up:
            yield replace(self._once("embedding", "y", places * columns, job.itemsize, times), kind="embedding")
        if network.norms:
            yield self._once("norms", "x", network.statistics * tokens, job.statistic, times)
            yield self._back("norms", "x", network.statistics * tokens, job.statistic, times)
        yield from self._linear(network.vocabulary_linear, tokens, times, again=False)
        if job.logits == "cut":
            exchange = self._once("loss", "y", LOSS_VALUES * tokens, job.statistic, times)
            for op in ("all_to_all", "all_gather") if exchange.size > 1 else ():
                yield replace(exchange, op=op, unit=LOSS_VALUES)
        else:  # each rank sends its part to all others; parts may differ
            whole = tokens * network.vocabulary_linear.local(self.sizes, self.places)[1] * self.grid.y
            yield replace(self._once("loss", "y", whole, job.itemsize, times), op="all_gather")

    def _linear(self, linear: Linear, tokens: int, times: int, *, again: bool = True) -> Iterator[Toll]:
        inputs, outputs = linear.local(self.sizes, self.places)
        contract, output = (
            Line(axis, self.sizes[axis], self.places[axis]) for axis in (linear.contract, linear.across)
        )
        itemsize = self.job.itemsize
        found = traffic.product(tokens, inputs, outputs, contract=contract, output=output, itemsize=itemsize)
        for one in found.forward:
            about = linear.name, one.axis, one.payload // itemsize, itemsize, times
            yield from self._forward(*about) if again else [self._once(*about)]
        for one in found.backward:
            yield self._back(linear.name, one.axis, one.payload // itemsize, itemsize, times)

    def _forward(self, where: str, axis: str, elements: int, itemsize: int, times: int) -> Iterator[Toll]:
        first = self._once(where, axis, elements, itemsize, times)
        yield first
        if self.job.recompute == "full":
            yield replace(first, when="again")

    def _once(self, where: str, axis: str, elements: int, itemsize: int, times: int) -> Toll:
        return self._toll(where, "forward", axis, "all_reduce", "activation", elements, itemsize, times)

    def _back(self, where: str, axis: str, elements: int, itemsize: int, times: int) -> Toll:
        return self._toll(where, "backward", axis, "all_reduce", "activation-gradient", elements, itemsize, times)
