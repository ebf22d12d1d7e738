"""AxoNN's 4D algorithm: weights lie over x, y and z, rows over z and data, features between linears over x or y."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourfold.ledger import Flow
from fourfold.placement.seats import room
from fourfold.planner.grids import grids
from fourfold.planner.tolls import Factors
from fourfold.recipes import _grid
from fourfold.recipes._claim import Claim
from fourfold.verify.measure import worst
from fourfold.wire import World
from fourfold.wire.threads import launch

RANKS = 8
ROWS, WIDTH, TABLE = 16, 32, 64
LAYERS = ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH))
"""Input and output features of the three linears, the second of which is transposed."""

COLLECTIVES = {
    "all-reduces over x, forward": Flow("x", "activation", "all_reduce"),
    "all-reduces over x, backward": Flow("x", "activation-gradient", "all_reduce"),
    "all-reduces over y, forward": Flow("y", "activation", "all_reduce"),
    "all-reduces over y, backward": Flow("y", "activation-gradient", "all_reduce"),
    "all-gathers over z": Flow("z", "weight", "all_gather"),
    "reduce-scatters over z": Flow("z", "gradient", "reduce_scatter"),
    "all-reduces over data": Flow("data", "gradient", "all_reduce"),
}
"""What the paper's table has a row for."""


def claim() -> Claim:
    """Singh et al. 2023, sections on the algorithm and on its communication model.

    Bytes are the table's, with three lines of this placement's: the last layer's weights stay from forward to backward
    and are gathered once; the embedding that feeds the layers is gathered, scattered and summed as they are (once);
    and behind the gradients that replicas sum ride the few numbers that ranks tell each other in a step.
    """
    factors = list(grids(RANKS))
    return Claim(
        system="AxoNN's 4D algorithm",
        paper="Singh et al. 2023, arXiv 2305.13525",
        statement=f"on all {len(factors)} grids of {RANKS} ranks outputs and gradients of three linears equal one "
        "process's; every collective sends the bytes of the paper's table; overlaps do not change gradients",
        predicted={
            "outputs differ from one process": 0.0,
            "gradients differ from one process": 0.0,
            "gradients differ with overlaps off": 0.0,
            "grids on which a collective differs from the table": 0.0,
            **{
                f"bytes of {what}, mean of grids": mean(_table(grid)[flow] for grid in factors)
                for what, flow in COLLECTIVES.items()
            },
        },
        measure=_measured,
        control=_control,
        off="results: nothing crosses between ranks; bytes: plain replicas",
        tolerance=1e-9,
    )


def _table(grid: Factors) -> Counter[Flow]:
    """Bytes that one rank sends in a step, by ring formulas (float64)."""
    x, y, z, data = grid
    table: Counter[Flow] = Counter()
    gather, stored = COLLECTIVES["all-gathers over z"], TABLE * WIDTH
    table[gather] += (z - 1) * stored // (x * y * z)
    for number, (k, n) in enumerate(LAYERS):
        (first, c), (second, r) = (("x", x), ("y", y)) if number % 2 == 0 else (("y", y), ("x", x))
        rows, weight = ROWS // (z * data), k * n // (x * y * z)
        table[Flow(first, "activation", "all_reduce")] += 2 * (c - 1) * rows * n // (r * c)
        table[Flow(second, "activation-gradient", "all_reduce")] += 2 * (r - 1) * rows * k // (c * r)
        gathers = 1 if number == len(LAYERS) - 1 else 2
        table[gather] += gathers * (z - 1) * weight
        stored += k * n
    local = stored // (x * y * z)
    table[COLLECTIVES["reduce-scatters over z"]] += (z - 1) * local
    summed = local + (room(data) if z == 1 else 0)
    table[COLLECTIVES["all-reduces over data"]] += 2 * (data - 1) * summed // data
    return Counter({flow: _grid.ITEM * elements for flow, elements in table.items()})


# ---- the network


class Layer(nn.Module):
    """A linear, and a nonlinearity."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, inputs] to [rows, outputs]."""
        return torch.tanh(self.linear(x))


class Perceptron(nn.Module):
    """Three layers behind an embedding, which lays their input's features over x."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TABLE, WIDTH)
        self.layers = nn.ModuleList(Layer(*sizes) for sizes in LAYERS)

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows] to [rows, outputs]."""
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def _built() -> Perceptron:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Perceptron().double()


_TEMPLATE = _built()
_BATCH = {"tokens": torch.randint(TABLE, (ROWS,), generator=torch.Generator().manual_seed(7))}


# ---- steps


class Step(NamedTuple):
    """One rank's step, with overlaps and without: errors of outputs and gradients, and bytes."""

    outputs: float
    gradients: float
    without: float
    sent: Mapping[Flow, int]


def _measured() -> dict[str, float]:
    expected = _expected()
    return _figures({grid: launch(RANKS, _step, grid, expected) for grid in grids(RANKS)})


def _control() -> dict[str, float]:
    expected = _expected()
    sent = launch(RANKS, _step, Factors(data=RANKS), expected)[0].sent
    cut = [grid for grid in grids(RANKS) if grid.data == 1]  # replicas that hear nothing of one another refuse to go on
    return _figures({grid: [_step(_grid.deaf(RANKS), grid, expected)._replace(sent=sent)] for grid in cut})


def _expected() -> dict[str, Tensor]:
    """Gradients of one process."""
    return _grid.serial(_TEMPLATE, lambda model, batch: _loss(model(batch["tokens"])), _BATCH).gradients


def _figures(found: Mapping[Factors, Sequence[Step]]) -> dict[str, float]:
    flows, steps = COLLECTIVES.values(), [step for ranks in found.values() for step in ranks]
    right = {
        grid: all(step.sent[flow] == _table(grid)[flow] for flow in flows for step in ranks)
        for grid, ranks in found.items()
    }
    return {
        "outputs differ from one process": max(step.outputs for step in steps),
        "gradients differ from one process": max(step.gradients for step in steps),
        "gradients differ with overlaps off": max(step.without for step in steps),
        "grids on which a collective differs from the table": len(right) - sum(right.values()),
        **{
            f"bytes of {what}, mean of grids": mean(step.sent[flow] for step in steps)
            for what, flow in COLLECTIVES.items()
        },
    }


def _step(world: World, grid: Factors, expected: Mapping[str, Tensor]) -> Step:
    """One step with overlaps, and the same without."""
    read, found = torch.empty(0), torch.empty(0)

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        nonlocal read, found
        read = batch["tokens"]
        found = model(read) * 1.0  # gathers features that lie in parts
        return _loss(found)

    gradients: list[dict[str, Tensor]] = []
    sent: Counter[Flow] = Counter()
    for overlap in (False, True):
        run = _grid.placed(world, {**grid.settings(), "overlap": overlap}, _TEMPLATE, loss, _BATCH)
        run.step(_BATCH)
        gradients.append(run.logical_gradients())
        sent = Counter({flow: one.bytes for flow, one in run.ledger.traffic(0).items()})
    outputs = worst({"": found.detach()}, {"": _TEMPLATE(read).detach()})
    without, overlapped = gradients
    return Step(outputs.error, worst(overlapped, expected).error, worst(without, overlapped).error, sent)


def _loss(out: Tensor) -> tuple[Tensor, int]:
    return out.square().sum(), len(out)
