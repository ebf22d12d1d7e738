"""A plan's units on a device: what is gathered, sent and kept, with the element types that the device computes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as Set
from math import prod
from typing import Any

import torch

from fourfold.hardware import Cluster
from fourfold.placement.layout import Layout
from fourfold.placement.precision import Precision
from fourfold.plan import Placement
from fourfold.planner.memory import Parcel


def precision(placement: Placement, cluster: Cluster) -> Precision:
    """The element types of a placement on the cluster's devices."""
    if cluster.is_cpu or placement.precision != "bf16":
        return Precision.of(placement.precision, torch.device("cpu"))
    return Precision(torch.float32, torch.bfloat16, torch.bfloat16)


def of_stage(units: list[Any], held: Set[str], bucket: int, itemsize: int, *, apart: bool) -> list[Any]:
    """The units of one pipeline stage (`placement.membership.members` with `held`).

    Args:
        units: of the whole model, one a block, as [name, blocks, [weight, shape, group], outer, still].
        held: the stage's weights.
        bucket, itemsize, apart: as there.
    """
    found: list[Any] = []
    for name, blocks, weights, outer, still in units:
        mine = [weight for weight in weights if weight[0] in held]
        if not mine:
            continue
        merges = not still and (bool(blocks) or not apart)
        if found and merges and found[-1][5] and _numel(found[-1][2]) * itemsize < bucket:
            last = found[-1]
            found[-1] = [f"{last[0]} + {name}", [*last[1], *blocks], last[2] + mine, last[3] or outer, still, True]
        else:
            found.append([name, list(blocks), mine, outer, still, merges])
    return [unit[:5] for unit in found]


def _numel(weights: list[Any]) -> int:
    return sum(prod(shape) for _, shape, _ in weights)


def parcels(
    units: list[Any],
    places: dict[str, int],
    placement: Placement,
    types: Precision,
    reached: frozenset[str],
    local: Mapping[str, Sequence[int]],
) -> tuple[Parcel, ...]:
    """The units of `traces.Traces.units`, cut over z.

    Args:
        units: as [name, blocks, [weight, shape, group], outer, still].
        places: number of each block in execution order.
        placement: that cuts them.
        types: of their elements.
        reached: blocks that backward comes to.
        local: shapes of the blocks that this rank holds of weights that are cut over x and y.
    """
    sharded = placement.shard == "parameters" and placement.z > 1
    return tuple(
        Parcel(
            layout=Layout.of(
                [(name, local.get(name, shape), group) for name, shape, group in weights], 1 if still else placement.z
            ),
            places=tuple(places[path] for path in blocks if path in places),
            master=types.master.itemsize,
            message=types.message.itemsize,
            compute=types.compute.itemsize,
            resident=still or not sharded,
            hold=placement.shard == "optimizer",
            outer=outer,
            reached=not reached.isdisjoint(blocks),
        )
        for _, blocks, weights, outer, still in units
    )
