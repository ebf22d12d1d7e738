"""Follows features through what takes tensors apart, turns them round and puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fourfold.anatomy.joins import flow, joined, matched
from fourfold.anatomy.reading import Reading
from fourfold.anatomy.spread import Atom, Spread, aligned, cut, dropped, permuted, plain, reshaped, single
from fourfold.anatomy.transcript import Op, Ref, is_ref


def reshape(reading: Reading, op: Op) -> None:
    """`view`, `reshape`, `flatten`, `unsqueeze`, …: the elements stay in their logical order."""
    x = op.operands[0]
    spread = reading.spread(x)
    if spread is None:
        flow(reading, op)
        return
    for result in op.results:
        heads = op.name in ("view", "reshape", "unflatten")
        seen = reshaped(single(spread, result.shape) if heads else spread, result.shape)
        if seen is None:
            reading.trouble(op, f"cannot follow features over {spread.axis} from {x.shape} to {result.shape}", [spread])
        reading.put(result, seen)


def permute(reading: Reading, op: Op) -> None:
    """`transpose`, `permute`, `movedim`, `.T`, `.mT`."""
    x, result = op.operands[0], op.results[0] if op.results else None
    if result is None:
        return
    order = _order(op, len(x.shape))
    view, spread = reading.view(x), reading.spread(x)
    if view is not None:
        reading.put_view(result, view._replace(dims=tuple(view.dims[dim] for dim in order)))
    if spread is not None:
        reading.put(result, permuted(spread, order))


def _order(op: Op, count: int) -> list[int]:
    order = list(range(count))
    if op.name == "permute":
        dims = op.argument(1, "dims")
        given = dims if isinstance(dims, (tuple, list)) else op.args[1:]
        return [dim % count for dim in given]
    if op.name == "movedim":
        source, target = (_listed(op.argument(at, name)) for at, name in ((1, "source"), (2, "destination")))
        moves = dict(zip((dim % count for dim in target), (dim % count for dim in source), strict=True))
        rest = iter(dim for dim in order if dim not in moves.values())
        return [moves[dim] if dim in moves else next(rest) for dim in order]
    if op.name in ("T", "H") or (op.name == "t" and count == 2):
        return order[::-1]
    first, second = (-1, -2) if op.name in ("mT", "mH", "adjoint", "t") else (_dim(op, 1, 0), _dim(op, 2, 1))
    if count > 1:
        order[first], order[second] = order[second], order[first]
    return order


def _listed(dims: int | Sequence[int]) -> Sequence[int]:
    return [dims] if isinstance(dims, int) else dims


def _dim(op: Op, index: int, default: int) -> int:
    names = {1: ("dim0", "axis0"), 2: ("dim1", "axis1")}[index]
    return next((value for name in names if (value := op.argument(index, name)) is not None), default)


def repeat(reading: Reading, op: Op) -> None:
    """`repeat`, `tile` (all of a dim again) and `repeat_interleave` (every entry again)."""
    x = op.operands[0]
    spread = reading.spread(x)
    if spread is None or not op.results:
        flow(reading, op)
        return
    result = op.results[0]
    dims: list[tuple[Atom, ...]] = [()] * (len(result.shape) - len(x.shape)) + list(spread.dims)
    for at, (atoms, size) in enumerate(zip(dims, result.shape, strict=True)):
        have = x.shape[at - len(result.shape) + len(x.shape)] if at >= len(result.shape) - len(x.shape) else 1
        if size != have and size % have == 0:
            copies = plain(size // have)
            dims[at] = (*atoms, *copies) if op.name == "repeat_interleave" else (*copies, *atoms)
        elif size != have:
            dims[at] = plain(size)
    reading.put(result, spread._replace(dims=tuple(dims)))


def pieces(reading: Reading, op: Op) -> None:
    """`split`, `chunk`, `unbind`, `tensor_split`: all pieces of a dim, one after the other."""
    x = op.operands[0]
    spread = reading.spread(x)
    if spread is None:
        _views_of_pieces(reading, op)
        return
    given = op.argument(1, "dim") if op.name == "unbind" else op.argument(2, "dim")
    dim, start = (given or 0) % len(x.shape), 0
    results = op.results
    for result in results:
        length = 1 if op.name == "unbind" else result.shape[dim]
        piece = taken(reading, spread, dim, start, length)
        reading.put(result, dropped(piece, [dim]) if op.name == "unbind" else piece)
        start += length


def _views_of_pieces(reading: Reading, op: Op) -> None:
    view = reading.view(op.operands[0])
    for result in op.results if view is not None else ():
        dims = matched(view.dims, op.operands[0].shape, result.shape)  # type: ignore[union-attr]
        reading.put_view(result, view._replace(dims=dims))  # type: ignore[union-attr]


def taken(reading: Reading, spread: Spread, dim: int, start: int, length: int, step: int = 1) -> Spread:
    """Some entries of a dim; if it is the one that is split, its sources are packed."""
    piece = cut(spread, dim, start, length, step)
    if spread.dim == dim and piece.sources != spread.sources:
        reading.packed(piece)
    return piece


def narrow(reading: Reading, op: Op) -> None:
    """`narrow(x, dim, start, length)` and `select(x, dim, index)`."""
    x, dim = op.operands[0], op.argument(1, "dim")
    spread = reading.spread(x)
    if spread is None or not op.results or not isinstance(dim, int):
        flow(reading, op)
        return
    dim %= len(x.shape)
    start = op.argument(2, "index" if op.name == "select" else "start")
    start = start % x.shape[dim] if isinstance(start, int) else 0
    piece = taken(reading, spread, dim, start, 1 if op.name == "select" else op.results[0].shape[dim])
    reading.put(op.results[0], dropped(piece, [dim]) if op.name == "select" else piece)


def index(reading: Reading, op: Op) -> None:
    """`x[…]` with numbers, slices, None, … and tensors."""
    x, results = op.operands[0], op.results
    spread, view = reading.spread(x), reading.view(x)
    if not results:
        return
    steps = _steps(op.args[1], x.shape)
    reading.put_window(results[0], x, steps)
    if spread is None and view is None:
        return
    dims: list[int | None] = []
    piece = spread
    looked_up = [at for at, step in enumerate(steps) if isinstance(step, Ref)]
    for step, dim in zip(steps, _numbered(steps), strict=True):
        if isinstance(step, slice) and dim is not None:
            start, stop, stride = step.indices(x.shape[dim])
            piece = piece and taken(reading, piece, dim, start, len(range(start, stop, stride)), stride)
            dims.append(dim)
        elif step is None:
            dims.append(None)
        elif isinstance(step, int) and dim is not None:
            piece = piece and taken(reading, piece, dim, step % x.shape[dim], 1)
    _lookup(reading, op, spread, steps, dims, looked_up)
    result = results[0]
    if view is not None:
        reading.put_view(result, view._replace(dims=tuple(None if dim is None else view.dims[dim] for dim in dims)))
    if piece is not None:
        sizes = zip(dims, result.shape, strict=True)
        atoms = tuple(plain(size) if dim is None else piece.dims[dim] for dim, size in sizes)
        reading.put(result, piece._replace(dims=atoms))


def _lookup(
    reading: Reading, op: Op, spread: Spread | None, steps: list[Any], dims: list[int | None], looked_up: list[int]
) -> None:
    """Dims that tensors index become those of the tensors, in front unless they are neighbours."""
    if not looked_up:
        return
    numbered = _numbered(steps)
    if spread is not None and spread.axis and spread.dim in [numbered[at] for at in looked_up]:
        reading.trouble(op, f"looks up by index among features that are split over {spread.axis}", [spread])
    new = len(op.results[0].shape) - len(dims)
    if looked_up[-1] - looked_up[0] == len(looked_up) - 1:
        before = sum(1 for step in steps[: looked_up[0]] if step is None or isinstance(step, slice))
    else:
        before = 0
    dims[before:before] = [None] * new


def _steps(given: Any, shape: tuple[int, ...]) -> list[Any]:
    """One entry for each dim of the tensor or new dim: a slice, a number, None, or a tensor (as often as it has dims).

    A tensor of no dims that picks one entry is taken for number 0: which one it is does not matter.
    """
    entries = list(given) if isinstance(given, (tuple, list)) and not is_ref(given) else [given]
    steps: list[Any] = []
    for entry in entries:
        if isinstance(entry, Ref) and not entry.shape:
            steps.append(0)
        elif isinstance(entry, list):
            steps.append(Ref(-1, (len(entry),), False))
        elif isinstance(entry, bool):
            steps.append(None)
        else:
            steps.append(entry)
    used = sum(1 for step in steps if step is not None and step is not Ellipsis)
    rest = [slice(None)] * (len(shape) - used)
    at = next((at for at, step in enumerate(steps) if step is Ellipsis), len(steps))
    return steps[:at] + rest + steps[at + 1 :]


def _numbered(steps: list[Any]) -> list[int | None]:
    """The dim of the tensor that each step is about."""
    dims, dim = [], 0
    for step in steps:
        dims.append(None if step is None else dim)
        dim += step is not None
    return dims


def put_together(reading: Reading, op: Op) -> None:
    """`cat` along a dim, `stack` along a new one."""
    parts = [part for part in (op.argument(0, "tensors") or ()) if is_ref(part)]
    given, result = op.argument(1, "dim", 0), op.results[0] if op.results else None
    spreads = [(part, spread) for part in parts if (spread := reading.spread(part)) is not None]
    if result is None or not spreads:
        return
    dim = given % len(result.shape)
    _, lead = max(spreads, key=lambda found: (found[1].axis is not None, found[1].together))
    if op.name == "stack":
        lead = lead._replace(dims=(*lead.dims[:dim], plain(len(parts)), *lead.dims[dim:]))
        reading.put(result, lead)
        return
    if lead.dim == dim and lead.axis is not None:
        reading.trouble(op, f"puts features over {lead.axis} side by side", [spread for _, spread in spreads])
    _check_parts(reading, op, lead, parts, dim)
    stride = lead.dims[dim][-1].stride if lead.dims[dim] else 0
    atoms = (Atom(result.shape[dim], stride),) if result.shape[dim] > 1 else ()
    sources = lead.sources if lead.dim != dim else frozenset()
    before = frozenset().union(*(spread.made_of for _, spread in spreads))
    reading.put(result, Spread(lead.axis, (*lead.dims[:dim], atoms, *lead.dims[dim + 1 :]), sources, before))


def _check_parts(reading: Reading, op: Op, lead: Spread, parts: Sequence[Ref], dim: int) -> None:
    """The parts are joined in all other dims; a parameter among them is raw."""
    for part in parts:
        spread, view = reading.spread(part), reading.view(part)
        if spread is not None:
            reading.keep(spread)
            if spread.axis and lead.axis and spread.axis != lead.axis:
                reading.trouble(op, "cat joins features over x with features over y", [lead, spread])
            elif spread.axis is None and lead.axis is not None and spread.dim == lead.dim != dim and not spread.shared:
                reading.trouble(op, f"cat joins whole features with features over {lead.axis}", [lead, spread])
        if view is not None:
            reading.joins(op, view, lead, part.shape)


def copied(reading: Reading, op: Op) -> None:
    """`a.copy_(b)` into all of a tensor, or, as `a[…].copy_(b)` and `a[…] = b` do, into a part of one."""
    target, value = op.operands[0], op.operands[-1]
    if op.name == "__setitem__":
        base, steps = target, _steps(op.args[1], target.shape)
        shape = _shape_of(steps, base.shape)
    else:
        base, steps = reading.window(target) or (target, [slice(None)] * len(target.shape))
        shape = target.shape
    given = reading.spread(value)
    if given is None or shape is None:
        return
    part = aligned(given, shape)
    kept = [dim for step, dim in zip(steps, _numbered(steps), strict=True) if isinstance(step, slice)]
    if part is None:
        if given.axis is not None:
            reading.trouble(op, f"cannot follow features over {given.axis} through {op.name}", [given])
        return
    dims = [plain(size) for size in base.shape]
    for atoms, size, dim in zip(part.dims, shape, kept, strict=True):
        if dim is not None:
            dims[dim] = atoms if size == base.shape[dim] else _longer(atoms, base.shape[dim])
    before = reading.spread(base)
    made = part.made_of | (before.made_of if before is not None else frozenset())
    written = Spread(part.axis, tuple(dims), part.sources if shape == base.shape else frozenset(), made)
    within = None if part.dim is None else kept[part.dim]
    cut_here = within is not None and shape[part.dim or 0] != base.shape[within]
    if part.axis is not None and cut_here:
        reading.trouble(op, f"puts features over {part.axis} side by side", [part])
    reading.keep(part)
    if before is not None and before.axis is not None and part.axis is not None and before.axis != part.axis:
        reading.trouble(op, f"{op.name} joins features over x with features over y", [before, part])
    if before is None or (before.axis is None and part.axis is not None):
        reading.put(base, written)
    else:
        reading.put(base, before._replace(before=made))


def _longer(atoms: tuple[Atom, ...], size: int) -> tuple[Atom, ...]:
    """A dim of which these atoms are a part."""
    return (Atom(size, atoms[-1].stride if atoms else 0),) if size > 1 else ()


def _shape_of(steps: list[Any], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Of what numbers and slices take of a tensor of this shape; None if tensors look it up."""
    sizes = []
    for step, dim in zip(steps, _numbered(steps), strict=True):
        if isinstance(step, slice) and dim is not None:
            sizes.append(len(range(*step.indices(shape[dim]))))
        elif not isinstance(step, int):
            return None
    return tuple(sizes)


def expand(reading: Reading, op: Op) -> None:
    """`expand`, `broadcast_to`: as in a join with something of the new shape."""
    x = op.operands[0]
    if reading.spread(x) is None:
        flow(reading, op)
        return
    for result in op.results:
        reading.put(result, joined(reading, op._replace(args=(x,), kwargs={}), result.shape))


def pairs(reading: Reading, op: Op) -> None:
    """`view_as_complex` makes the pairs in the last dim numbers, `view_as_real` undoes it."""
    spread = reading.spread(op.operands[0])
    if spread is not None and op.results:
        one = dropped(spread, [-1]) if op.name == "view_as_complex" else None
        reading.put(op.results[0], one or spread._replace(dims=(*spread.dims, plain(2))))


def new(reading: Reading, op: Op) -> None:
    """`new_zeros` and its like take nothing from the tensor but its kind."""
    for result in op.results:
        reading.put(result, None)


RESHAPES = ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "squeeze", "unsqueeze")
TURNS = ("transpose", "swapaxes", "swapdims", "permute", "movedim", "t", "T", "mT", "H", "mH", "adjoint")
NEWS = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
HANDLERS = {
    **dict.fromkeys(RESHAPES, reshape),
    **dict.fromkeys(TURNS, permute),
    **dict.fromkeys(("repeat", "tile", "repeat_interleave"), repeat),
    **dict.fromkeys(("split", "chunk", "unbind", "tensor_split", "split_with_sizes"), pieces),
    **dict.fromkeys(("narrow", "select"), narrow),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), put_together),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand),
    **dict.fromkeys(NEWS, new),
    **dict.fromkeys(("view_as_complex", "view_as_real"), pairs),
    "__getitem__": index,
    **dict.fromkeys(("copy", "__setitem__"), copied),
}
