"""The time of a step on a grid, in closed form: products by a roofline, rings by a bandwidth model, what hides what.

One collective travels at a time. Forward's sums are waited for. An input gradient's sum hides behind its weight
gradient's product, gathers behind the blocks before, scatters behind the rest of backward, sums over data behind what
is then left of the last micro-batch's backward; of each kind at least one has nothing to hide behind. (Singh et al.
2023, arXiv 2305.13525, name these three overlaps; its own model ranks by the sum of all communication, `busy` here.)
"""

from __future__ import annotations

from functools import cached_property

from fourfold.hardware import Cluster
from fourfold.hardware.sharing import Sharing, Span, ring_seconds
from fourfold.planner.clock import LIKELY, UPDATE_BYTES, Assumptions, Timing
from fourfold.planner.held import MASTER, block_keeps
from fourfold.planner.network import Linear
from fourfold.planner.tolls import AXES, Toll, Tolls

DTYPES = {2: "bf16", 4: "fp32", 8: "fp64"}
"""A cluster's name of the type that is computed in, by its size."""


class Pace:
    """One rank's step."""

    def __init__(self, tolls: Tolls, cluster: Cluster, sharing: Sharing, assume: Assumptions = LIKELY):
        self.tolls, self.cluster, self.sharing, self.assume = tolls, cluster, sharing, assume
        device = cluster.device
        self.peak = device.peak(DTYPES[tolls.job.itemsize]) * min(1.0, device.efficiency * assume.gemm)
        self.memory = device.memory_bandwidth * assume.memory

    def seconds(self, toll: Toll) -> float:
        """One of these collectives."""
        copies = self.tolls.sizes[toll.axis] // toll.size if toll.where == "copies" else 1
        stride = self.tolls.grid.stride(toll.axis) * copies
        span = Span(toll.size, stride, self.tolls.grid.world)
        return ring_seconds(toll.op, toll.nbytes, self.cluster, span, self.sharing) / self.assume.link

    @cached_property
    def each(self) -> list[tuple[Toll, float]]:
        """Every collective with its seconds, once."""
        return [(toll, self.seconds(toll)) for toll in self.tolls.listed]

    @cached_property
    def busy(self) -> dict[str, float]:
        """Seconds of communication in a step by axis, hidden or not: what AxoNN's model ranks by."""
        return {axis: sum(toll.times * took for toll, took in self.each if toll.axis == axis) for axis in AXES}

    def timing(self) -> Timing:
        """The step."""
        forward, backward = self._compute()
        timing = Timing(compute=forward + backward, update=self._update())
        exposed, hidden_sums = self._sums()
        gather, again, scatter = self._all("forward", "z"), self._gathers_again(), self._scatters()
        room = backward - hidden_sums
        exposed["z"] += self._beyond(gather, forward) + self._beyond_both(again, scatter, room)
        exposed["z"] += self._all("step", "z")[0]
        left = max(0.0, room - again[0] - scatter[0]) / self.tolls.job.microbatches
        exposed["data"] += self._beyond(self._all("step", "data"), left)
        exposed["y"] += self._all("step", "y")[0]
        timing.exposed = {axis: waited for axis, waited in exposed.items() if waited}
        timing.hidden = {axis: busy - exposed[axis] for axis, busy in self.busy.items() if busy > exposed[axis]}
        timing.stretched = (self.assume.slowdown - 1) * min(sum(timing.hidden.values()), timing.compute)
        return timing

    # ---- compute

    def product(self, linear: Linear, tokens: int) -> float:
        """Seconds of one product of a linear: forward, weight gradient and input gradient take as long."""
        inputs, outputs = linear.local(self.tolls.sizes, self.tolls.places)
        moved = self.tolls.job.itemsize * (tokens * inputs + inputs * outputs + tokens * outputs)
        return max(2 * tokens * inputs * outputs / self.peak, moved / self.memory, self.assume.launch)

    def core(self, tokens: int) -> float:
        """Seconds of a block's attention core, forward, counted dense."""
        network = self.tolls.network
        heads = -(-network.heads // self.tolls.grid.y)
        return 4 * tokens * network.sequence * heads * network.head / self.peak

    def _compute(self) -> tuple[float, float]:
        """Seconds of all forwards and all backwards of a step, recomputation in the latter."""
        network, job = self.tolls.network, self.tolls.job
        forward = backward = 0.0
        for tokens, times in self.tolls.tokens.items():
            products = sum(self.product(linear, tokens) for linear in network.linears)
            core = self.core(tokens)
            around = 2 * block_keeps(self.tolls, tokens) / self.memory  # what is kept is written once and read once
            block = products + core + around
            again = {"full": block, "selective": core}.get(job.recompute, 0.0)
            head = self.product(network.vocabulary_linear, tokens) if network.vocabulary else 0.0
            forward += times * (network.blocks * block + head)
            backward += times * (network.blocks * (2 * block + again) + 2 * head)
        return forward, backward

    def _update(self) -> float:
        shard = self.tolls.network.blocks * self.tolls.block.size + self.tolls.outer.size
        return UPDATE_BYTES * MASTER * shard / self.memory

    # ---- communication

    def _sums(self) -> tuple[dict[str, float], float]:
        """Seconds of waiting for sums over x and y by axis, and of sums that weight gradients hide."""
        exposed, hidden = dict.fromkeys(AXES, 0.0), 0.0
        by_name = {
            linear.name: linear for linear in (*self.tolls.network.linears, self.tolls.network.vocabulary_linear)
        }
        for toll, took in self.each:
            if toll.axis not in ("x", "y") or toll.when == "step":
                continue
            behind = 0.0
            if toll.when == "backward" and toll.where in by_name and self.tolls.job.overlap:
                linear = by_name[toll.where]
                inputs = linear.local(self.tolls.sizes, self.tolls.places)[0]
                behind = min(took, self.product(linear, toll.elements // inputs))
            exposed[toll.axis] += toll.times * (took - behind)
            hidden += toll.times * behind
        return exposed, hidden

    def _all(self, when: str, axis: str, op: str = "") -> tuple[float, float]:
        """Seconds of these collectives in a step, and of the longest of them."""
        found = [(toll.times * took, took) for toll, took in self.each if self._is(toll, when, axis, op)]
        return sum(total for total, _ in found), max((took for _, took in found), default=0.0)

    def _is(self, toll: Toll, when: str, axis: str, op: str) -> bool:
        return toll.axis == axis and toll.when == when and op in ("", toll.op)

    def _gathers_again(self) -> tuple[float, float]:
        return self._all("backward", "z", "all_gather")

    def _scatters(self) -> tuple[float, float]:
        return self._all("backward", "z", "reduce_scatter")

    def _beyond(self, took: tuple[float, float], room: float) -> float:
        """What does not hide: all without overlap, else what is too much, and one at least."""
        total, one = took
        return max(one, total - room) if self.tolls.job.overlap else total

    def _beyond_both(self, again: tuple[float, float], scatter: tuple[float, float], room: float) -> float:
        return self._beyond((again[0] + scatter[0], scatter[1]), room)
