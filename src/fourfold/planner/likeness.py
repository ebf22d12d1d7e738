"""A traced model as the numbers that closed forms know: so that grids can be ranked before any of them is traced.

One block stands for all. What closed forms do not know is left out, here and on every grid alike: what runs whole,
convolutions, and that a layer of experts computes some of them for a token (it counts as one expert). The forecast
of a grid that is traced knows better.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TypeVar

from fourfold.anatomy import Anatomy
from fourfold.anatomy import Linear as Role
from fourfold.planner.network import Band, Linear, Network
from fourfold.planner.traces import Traces

T = TypeVar("T")
Shapes = Mapping[str, Sequence[int]]


def network(traces: Traces) -> Network | None:
    """The traced model's likeness; None where it cannot be cut over x and y, or has no blocks with linears to cut."""
    anatomy = traces.anatomy
    shapes: Shapes = {name: shape for _, _, weights, *_ in traces.outline["units"] for name, shape, _ in weights}
    if anatomy.problems or not anatomy.blocks:
        return None
    block = anatomy.blocks[len(anatomy.blocks) // 2]
    roles = {name: role for name, role in _within(anatomy.linears, block).items() if role.contract and role.output}
    normal = [name for name, role in roles.items() if role.contract == "x"]
    if not normal:
        return None
    widths = {name: _widths(role, shapes[name]) for name, role in roles.items()}
    heads, kv_heads, head = _heads(roles, widths)
    norms = [path for path, norm in _within(anatomy.norms, block).items() if norm.spans and norm.axis == "x"]
    tables = sorted((shapes[name][0] for name in anatomy.embeddings), reverse=True)
    return Network(
        traces.subject.name,
        tuple(_linears(anatomy, block, roles, shapes, widths, kv_heads)),
        blocks=len(anatomy.blocks),
        hidden=widths[normal[0]][0],
        sequence=_sequence(traces, block),
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        norms=len(norms),
        statistics=2 if any(f"{path}.bias" in shapes for path in norms) else 1,
        vocabulary=tables[0] if tables else 0,
        positions=tables[1] if len(tables) > 1 else 0,
        tied=any(name in anatomy.linears for name in anatomy.embeddings),
        masks=sum(one.kind == "dropout" for one in anatomy.dropouts if f"{one.module}.".startswith(f"{block}.")),
    )


def _within(found: Mapping[str, T], block: str) -> dict[str, T]:
    return {name: one for name, one in found.items() if name.startswith(f"{block}.")}


def _widths(role: Role, shape: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """(input features, output features of every section) of a linear."""
    order = role.layout.split(",")
    return shape[order.index("in")], role.parts or (shape[order.index("out")],)


def _heads(roles: Mapping[str, Role], widths: Mapping[str, tuple[int, tuple[int, ...]]]) -> tuple[int, int, int]:
    """(query heads, key-value heads, features of a head); zeros without attention."""
    counts = [size // role.unit_out for name, role in roles.items() if role.unit_out > 1 for size in widths[name][1]]
    if not counts:
        return 0, 0, 0
    return max(counts), min(counts), max(role.unit_out for role in roles.values())


def _band(features: int, unit: int, kv_heads: int) -> Band:
    """Features that are dealt one by one, in heads, or in the query heads that share a key-value head."""
    heads = features // unit
    if unit == 1 or heads <= kv_heads:
        return Band(heads, unit)
    return Band(kv_heads, features // kv_heads, heads // kv_heads)


def _named(block: str, group: Sequence[str]) -> str:
    """Paths inside the block: "attention.q|k|v"."""
    first, *others = (name.removeprefix(f"{block}.").removesuffix(".weight") for name in group)
    return "|".join([first, *(other.rpartition(".")[2] for other in others)])


def _linears(
    anatomy: Anatomy,
    block: str,
    roles: Mapping[str, Role],
    shapes: Shapes,
    widths: Mapping[str, tuple[int, tuple[int, ...]]],
    kv_heads: int,
) -> Iterator[Linear]:
    """The products of a block: siblings are one."""
    done: set[str] = set()
    for name, role in roles.items():
        if name in done:
            continue
        group = next((names for names in anatomy.siblings if name in names), (name,))
        group = [one for one in group if one in roles and roles[one].contract == role.contract]
        done.update(group)
        outputs = tuple(_band(size, roles[one].unit_out, kv_heads) for one in group for size in widths[one][1])
        transposed = role.contract == "y"
        yield Linear(
            _named(block, group),
            _band(widths[name][0], role.unit_in, kv_heads),
            outputs,
            transposed,
            bias=f"{name.removesuffix('weight')}bias" in shapes,
            # a gated layer keeps what is activated, too
            kept=() if transposed else outputs + outputs[1:] * (len(outputs) == 2),
        )


def _sequence(traces: Traces, block: str) -> int:
    """Tokens of a row as the block sees them."""
    said = ast.literal_eval(traces.outline["inputs"].get(block, "[]"))
    if not said or len(said[0]) < 2:
        return traces.subject.tokens_per_row
    rows, *others, _ = said[0]
    return prod(others) if rows else traces.subject.tokens_per_row
