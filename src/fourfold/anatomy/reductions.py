"""Follows features through what reduces or looks them up: sums, softmax, norms, embeddings."""

from __future__ import annotations

from fourfold.anatomy.joins import acting, flow
from fourfold.anatomy.reading import Reading, segment
from fourfold.anatomy.spread import Spread, dropped, fresh, plain
from fourfold.anatomy.transcript import Op, is_ref
from fourfold.anatomy.views import taken

ALL = object()


def reduce(reading: Reading, op: Op) -> None:
    """Along the dims that it is given: right on whole features and inside of a unit; what is split needs a sum."""
    x = op.operands[0]
    spread = reading.spread(x)
    if spread is None:
        flow(reading, op)
        return
    dims = _dims(op, len(x.shape))
    if dims is None:  # `torch.max(a, b)`
        flow(reading, op)
        return
    reading.keep(spread)
    if spread.dim in dims:
        reading.crossed(op, spread)
    views = [(ref, view) for ref in op.operands[1:] if (view := reading.view(ref)) is not None]
    made = spread.made_of | acting(reading, op, spread)
    for result in op.results:
        left = _left(spread, dims, x.shape, result.shape)
        reading.put(result, left and left._replace(before=made))
    for ref, view in views:  # the affine weights of a norm
        reading.joins(op, view, spread, ref.shape)


def _left(spread: Spread, dims: set[int], before: tuple[int, ...], after: tuple[int, ...]) -> Spread | None:
    if after == before:
        return spread
    if len(after) < len(before):
        left = dropped(spread, list(dims))
        return left if left.shape == after else None
    kept = tuple(plain(after[dim]) if dim in dims else atoms for dim, atoms in enumerate(spread.dims))
    return spread._replace(dims=kept, sources=spread.sources if spread.dim not in dims else frozenset())


def _dims(op: Op, count: int) -> set[int] | None:
    if op.name in ("layer_norm", "rms_norm"):
        return set(range(count - len(op.argument(1, "normalized_shape")), count))
    index, default = _PLACES[op.name]
    given = op.argument(index, "dim", op.kwargs.get("axis", default))
    if is_ref(given):
        return None
    if given is None or given is ALL or isinstance(given, bool):
        return set(range(count))
    return {dim % count for dim in (given if isinstance(given, (tuple, list)) else [given])}


def gated(reading: Reading, op: Op) -> None:
    """`F.glu`: one half of the features times a function of the other."""
    x, dim = op.operands[0], op.argument(1, "dim", -1) % len(op.operands[0].shape)
    spread = reading.spread(x)
    if spread is None:
        flow(reading, op)
        return
    half = x.shape[dim] // 2
    first, second = (taken(reading, spread, dim, start, half) for start in (0, half))
    reading.put(op.results[0], first._replace(sources=first.sources | second.sources))


def embedding(reading: Reading, op: Op) -> None:
    """`F.embedding`: the columns of a table lie over x."""
    view, result = reading.weight(op.argument(1, "weight")), op.results[0]
    if view is None:
        return
    reading.found.embeddings[view.name] = "x"
    reading.put(result, fresh("x", result.shape, -1, segment(view.name, result.shape[-1])))


def grouped(reading: Reading, op: Op) -> None:
    """`F.group_norm`: across the channels (dim 1) of each group, which stay together; a single group is all of them."""
    x, groups = op.operands[0], op.argument(1, "num_groups")
    spread = reading.spread(x)
    if spread is None:
        return
    if spread.dim == 1 and groups > 1:
        reading.keep(spread, max(spread.apart, x.shape[1] // groups))
    elif spread.dim == 1:
        reading.crossed(op, spread)
    _affine(reading, op, spread)
    reading.put(op.results[0], spread)


def channels(reading: Reading, op: Op) -> None:
    """`batch_norm`, `instance_norm`: every channel by itself, but the running statistics are no features."""
    x = op.operands[0]
    spread = reading.spread(x)
    if spread is not None and spread.axis is not None and any(reading.weight(ref) is None for ref in op.operands[1:]):
        reading.trouble(op, f"{op.name} keeps statistics of channels that are split over {spread.axis}", [spread])
    if spread is not None:
        _affine(reading, op, spread)
        reading.put(op.results[0], spread)


def _affine(reading: Reading, op: Op, spread: Spread) -> None:
    """Weight and bias of a norm by channels."""
    for ref in op.operands[1:]:
        view = reading.view(ref)
        if view is not None:
            reading.joins(op, view, spread, (ref.shape[0], *(1,) * (len(spread.dims) - 2)))


_PLACES: dict[str, tuple[int, object]] = {
    **dict.fromkeys(("sum", "mean", "var", "std", "amax", "amin", "max", "min", "prod", "logsumexp"), (1, ALL)),
    **dict.fromkeys(("argmax", "argmin", "any", "all", "var_mean", "std_mean"), (1, ALL)),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "argsort", "sort"), (1, -1)),
    **dict.fromkeys(("topk", "kthvalue"), (2, -1)),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), (2, ALL)),
    "normalize": (2, 1),
    "layer_norm": (1, -1),
    "rms_norm": (1, -1),
}
HANDLERS = {
    **dict.fromkeys(_PLACES, reduce),
    "glu": gated,
    "embedding": embedding,
    "group_norm": grouped,
    **dict.fromkeys(("batch_norm", "instance_norm"), channels),
}
