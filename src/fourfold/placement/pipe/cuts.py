"""Where to cut a line of layers: the slowest stage as fast as can be, under a cap on what each holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf, prod

from torch import nn

from fourfold.anatomy.layers import INSIDE, Layers
from fourfold.placement.refusals import PlacementError


def balanced(
    costs: Sequence[float],
    stages: int,
    *,
    sizes: Sequence[float] | None = None,
    caps: Sequence[float] | None = None,
    allowed: Sequence[bool] | None = None,
) -> tuple[int, ...]:
    """Bounds of stages, by dynamic programming over the layers, O(stages · layers²).

    Of all ways to cut with the smallest maximum of the stages' costs it is the one whose first stages are shortest.

    Args:
        costs: of each layer, in any unit of time.
        stages: how many to make; none is empty.
        sizes: what each layer holds, for the caps.
        caps: the most that each stage may hold; None: any amount.
        allowed: of each bound 0 … layers, whether the line may be cut there; None: anywhere.

    Returns:
        stages + 1 numbers; stage s has layers bounds[s] … bounds[s + 1] - 1.

    Raises:
        PlacementError: more stages than layers, or no way to cut holds the caps.
    """
    count = len(costs)
    if stages > count:
        raise PlacementError(
            f"plan.placement.pipe: {stages} stages want at least as many layers, found {count}; try {count} stages"
        )
    summed, held = [0.0, *accumulate(costs)], [0.0, *accumulate(sizes or [0.0] * count)]

    def fits(stage: int, first: int, last: int) -> bool:
        if allowed is not None and not allowed[last]:
            return False
        return caps is None or held[last] - held[first] <= caps[stage]

    best: list[list[float]] = [[inf] * (count + 1) for _ in range(stages + 1)]
    best[stages][count] = 0.0
    chosen = [[count] * (count + 1) for _ in range(stages)]
    for stage in reversed(range(stages)):
        for first in range(stage, count):
            for last in range(first + 1, count - (stages - stage - 1) + 1):
                if fits(stage, first, last):
                    slowest = max(summed[last] - summed[first], best[stage + 1][last])
                    if slowest < best[stage][first]:
                        best[stage][first], chosen[stage][first] = slowest, last
    if best[0][0] == inf:
        raise PlacementError(
            f"plan.placement.pipe: no way to cut {count} layers into {stages} stages holds what they may hold "
            f"({list(caps or ())}) and cuts where the model can be cut; try fewer or more stages, or sharded weights"
        )
    bounds = [0]
    for stage in range(stages):
        bounds.append(chosen[stage][bounds[-1]])
    return tuple(bounds)


def estimated(model: nn.Module, layers: Layers) -> list[float]:
    """Costs of layers where nothing has been traced or measured: their weights, but for tables that are looked up."""
    weights = dict(model.named_parameters())
    found = []
    for layer in layers.calls:
        module = model.get_submodule(layer.path)
        tables = {id(inner.weight) for inner in module.modules() if isinstance(inner, nn.Embedding)}
        read = (weights[name] for name in layer.reads)
        found.append(float(sum(prod(weight.shape) for weight in read if id(weight) not in tables)))
    return found


def possible(layers: Layers) -> list[bool]:
    """Of each bound, whether the line may be cut there: nothing crosses but results of layers."""
    inner = range(1, len(layers))
    return [True, *(all(value.leaf != INSIDE for value in layers.crossing(cut)) for cut in inner), True]


def said(cut: tuple[int, ...], stages: int, line: Layers) -> tuple[int, ...]:
    """Bounds of stages with these numbers of layers.

    Raises:
        PlacementError: they do not add up to the model, or cut it where it cannot be cut.
    """
    paths = [layer.path for layer in line.calls]
    if len(cut) != stages or sum(cut) != len(paths) or min(cut) < 1:
        raise PlacementError(
            f"plan.placement.cut: expected {stages} numbers of at least 1 that add up to the model's {len(paths)} "
            f"layers ({', '.join(paths)}), found {list(cut)}, which add up to {sum(cut)}; no layer may be left out"
        )
    bounds = (0, *(sum(cut[: number + 1]) for number in range(stages)))
    fit = possible(line)
    for bound in bounds:
        if not fit[bound]:
            places = [at for at in range(1, len(paths)) if fit[at]]
            raise PlacementError(
                f"plan.placement.cut: layer {paths[bound]} or one behind it reads what an earlier layer made or "
                "changed inside (state that they share), which is none of its results and cannot cross; expected "
                f"cuts before layers {places}, found {bound}"
            )
    return bounds
