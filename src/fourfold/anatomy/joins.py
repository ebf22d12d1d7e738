"""Follows features through what joins tensors element by element, as any function that nobody knows is taken to do."""

from __future__ import annotations

from fourfold.anatomy.reading import Reading
from fourfold.anatomy.spread import Segment, Spread, aligned
from fourfold.anatomy.transcript import Op


def flow(reading: Reading, op: Op) -> None:
    """What is not known by name keeps the place of its operands' features: everything elementwise does."""
    results = op.results
    spreads = [spread for spread in map(reading.spread, op.operands) if spread is not None]
    if not spreads:
        _flow_of_parameter(reading, op)
        return
    for result in results:
        reading.put(result, joined(reading, op, result.shape))


def _flow_of_parameter(reading: Reading, op: Op) -> None:
    """An expanded, cast or shifted parameter is still that parameter."""
    views = [(ref, view) for ref in op.operands if (view := reading.view(ref)) is not None]
    if len({(view.name, view.place) for _, view in views}) != 1:
        return
    ref, view = views[0]
    for result in op.results:
        reading.put_view(result, view._replace(dims=matched(view.dims, ref.shape, result.shape)))


def matched(dims: tuple[int | None, ...], before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int | None, ...]:
    """Which dims of a parameter the dims of a view's view are: by their sizes from the right, else in order."""
    shift = len(after) - len(before)
    if shift >= 0 and all(size in (1, after[at + shift]) for at, size in enumerate(before)):
        return (*(None,) * shift, *(dim if size > 1 else None for dim, size in zip(dims, before, strict=True)))
    real = [(size, dim) for size, dim in zip(before, dims, strict=True) if size > 1]
    if [size for size, _ in real] == [size for size in after if size > 1]:
        left = iter(dim for _, dim in real)
        return tuple(next(left) if size > 1 else None for size in after)
    return tuple(-1 if size > 1 else None for size in after)


def joined(reading: Reading, op: Op, shape: tuple[int, ...]) -> Spread | None:
    """Where the features of the result lie, if all operands are joined elementwise; notes what that says of them."""
    placed = [(ref, aligned(spread, shape)) for ref in op.operands if (spread := reading.spread(ref)) is not None]
    spreads = [spread for _, spread in placed if spread is not None]
    if len(spreads) < len(placed):
        given = [reading.spread(ref) for ref, _ in placed]
        axis = next((spread.axis for spread in given if spread and spread.axis), None)
        if axis is not None:
            reading.trouble(op, f"cannot follow features over {axis} through {op.name}", given)
        return None
    if len({spread.axis for spread in spreads if spread.axis}) > 1:
        reading.trouble(op, f"{op.name} joins features over x with features over y", spreads)
    lead = max(spreads, key=lambda spread: (spread.axis is not None, spread.together))
    for other in spreads:
        _agree(reading, op, lead, other)
    for ref in op.operands:
        view = reading.view(ref)
        if view is not None:
            reading.joins(op, view, lead, ref.shape)
    return lead._replace(
        sources=frozenset().union(*(s.sources for s in spreads if s.axis == lead.axis)),
        before=frozenset().union(*(s.before for s in spreads), acting(reading, op, lead)),
    )


def acting(reading: Reading, op: Op, spread: Spread) -> frozenset[Segment]:
    """The parameters that join whole features here: their gradients are as whole, or as partial, as these features'."""
    views = [view.name for ref in op.operands if (view := reading.weight(ref)) is not None]
    return frozenset(Segment(name, 0, 1) for name in views) if spread.axis is None else frozenset()


def _agree(reading: Reading, op: Op, lead: Spread, other: Spread) -> None:
    """Of two tensors that are joined, both are split at the same places."""
    if other.axis is None and lead.axis is not None:
        if other.dim == lead.dim and not other.shared:
            reading.trouble(op, f"{op.name} joins whole features with features over {lead.axis}", [lead, other])
    elif other.dim != lead.dim and other.axis == lead.axis:
        reading.trouble(op, f"{op.name} joins features over {lead.axis} that lie in different dims", [lead, other])
    else:
        reading.keep(other, lead.together * other.apart // other.together)
