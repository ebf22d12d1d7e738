"""Follows features through what sums products: linears, convolutions, matrix products, attention."""

from __future__ import annotations

from typing import NamedTuple

from fourfold.anatomy.bystanders import View
from fourfold.anatomy.joins import flow
from fourfold.anatomy.reading import Reading, segment
from fourfold.anatomy.roles import FLIP, Linear
from fourfold.anatomy.spread import Atom, Spread, fresh, plain
from fourfold.anatomy.transcript import Op, Ref

ROLES: dict[str | None, str] = {"x": "normal", "y": "transposed", None: "entry"}


class Term(NamedTuple):
    """An operand of a sum of products, with one letter a dim."""

    ref: Ref
    letters: str


def linear(reading: Reading, op: Op) -> None:
    """`F.linear(x, weight, bias)`."""
    x, weight = op.argument(0, "input"), op.argument(1, "weight")
    batch = _letters(len(x.shape) - 1)
    product(reading, op, [Term(x, f"{batch}I"), Term(weight, "OI")], f"{batch}O")


def addmm(reading: Reading, op: Op) -> None:
    """`torch.addmm(bias, x, weight)`, as transformers' Conv1D calls it; `addbmm`'s like are no linears."""
    x, weight = op.argument(1, "mat1"), op.argument(2, "mat2")
    product(reading, op, [Term(x, "aI"), Term(weight, "IO")], "aO")


def matmul(reading: Reading, op: Op) -> None:
    """`a @ b` with broadcast batch dims, `mm`, `bmm`; in `baddbmm` what is added comes first."""
    first = 1 if op.name == "baddbmm" else 0
    a, b = op.operands[first : first + 2]
    if op.name == "__rmatmul__":
        a, b = b, a
    if not a.shape or not b.shape or len(a.shape) == 1 or len(b.shape) == 1:
        flow(reading, op)
        return
    out = _letters(len(op.results[0].shape) - 2)
    left, right = out[len(out) - len(a.shape) + 2 :], out[len(out) - len(b.shape) + 2 :]
    product(reading, op, [Term(a, f"{left}MK"), Term(b, f"{right}KN")], f"{out}MN")
    if first:
        _added(reading, op, op.operands[0])


def grouped(reading: Reading, op: Op) -> None:
    """`F.grouped_mm(x, weight)`: (rows, in) by (experts, in, out), the experts' rows one after the other."""
    x, weight = op.operands[:2]
    product(reading, op, [Term(x, "aI"), Term(weight, "eIO")], "aO")


def einsum(reading: Reading, op: Op) -> None:
    """`torch.einsum` of an equation, not of lists."""
    equation = op.argument(0, "equation")
    if not isinstance(equation, str):
        flow(reading, op)
        return
    left, arrow, out = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
        out = f"{'...' if '...' in left else ''}{''.join(letters)}"
    counts = [
        (ref, letters, len(ref.shape) - len(letters) + 3)
        for ref, letters in zip(op.operands, left.split(","), strict=True)
    ]
    most = max((count for _, letters, count in counts if "..." in letters), default=0)
    names = "αβγδεζηθ"[:most]
    terms = [Term(ref, letters.replace("...", names[most - count :])) for ref, letters, count in counts]
    product(reading, op, terms, out.replace("...", names))


def convolution(reading: Reading, op: Op) -> None:
    """`conv1d` … `conv3d`: features in dim 1 of (rows, features, …)."""
    x, weight = op.argument(0, "input"), op.argument(1, "weight")
    groups, spread = op.argument(6, "groups", 1), reading.spread(x)
    if groups != 1:
        if spread is not None and spread.axis is not None:
            reading.trouble(op, f"{op.name} in {groups} groups of features that are split over {spread.axis}", [spread])
        reading.put(op.results[0], fresh(spread.axis, op.results[0].shape, 1) if spread else None)
        return
    space = _letters(len(x.shape) - 2)
    window = space.upper().translate({ord("I"): "!", ord("O"): "?"})
    product(reading, op, [Term(x, f"zI{space}"), Term(weight, f"OI{window}")], f"zO{space}")


def attention(reading: Reading, op: Op) -> None:
    """`F.scaled_dot_product_attention`: heads over the axis; keys and values of fewer heads are shared."""
    query, key, value = (op.argument(at, name) for at, name in enumerate(("query", "key", "value")))
    spreads = [spread for spread in (reading.spread(ref) for ref in (query, key, value)) if spread is not None]
    result = op.results[0]
    if not spreads:
        return
    heads = len(result.shape) - 3
    lead = max(spreads, key=lambda spread: (spread.axis is not None, reading.spread(query) is spread))
    for ref in (query, key, value):
        _head(reading, op, ref, lead, heads)
    if len({spread.axis for spread in spreads if spread.axis}) > 1:
        reading.trouble(op, "attention of heads over x and heads over y", spreads)
    _masked(reading, op, lead, heads)
    if lead.dim is not None and lead.dim <= heads:
        dims = tuple(_marked(lead, dim) for dim in range(len(result.shape) - 1))
        before = frozenset().union(*(spread.made_of for spread in spreads))
        reading.put(result, Spread(lead.axis, (*dims, plain(result.shape[-1])), before=before))
        _added(reading, op, op.argument(3, "attn_mask"))


def _added(reading: Reading, op: Op, ref: object) -> None:
    """What is added to products, if it has no features, joins those of the result."""
    view, spread = reading.view(ref), reading.spread(op.results[0])
    if isinstance(ref, Ref) and view is not None and spread is not None:
        reading.joins(op, view, spread, ref.shape)


def _head(reading: Reading, op: Op, ref: Ref, lead: Spread, heads: int) -> None:
    """A query, key or value beside the one that leads: its heads lie over the same axis, or it has one for all."""
    spread = reading.spread(ref)
    if spread is None or spread.dim is None:
        return
    reading.keep(spread)
    if spread.dim > heads:
        reading.crossed(op, spread)
    elif spread.axis is None and lead.axis is not None and not spread.shared:
        reading.trouble(op, f"attention of whole heads and heads over {lead.axis}", [spread, lead])


def _masked(reading: Reading, op: Op, lead: Spread, heads: int) -> None:
    """A mask made of features (a table of biases by distance, say): one of them a head, and over the same axis."""
    mask = op.argument(3, "attn_mask")
    spread = reading.spread(mask)
    if spread is None or spread.dim is None:
        return
    at = spread.dim + len(op.results[0].shape) - len(spread.dims)
    if spread.axis is not None and (spread.axis != lead.axis or at != lead.dim):
        lies = f"heads over {lead.axis}" if lead.axis and lead.dim is not None and lead.dim <= heads else "whole heads"
        reading.trouble(op, f"attention of {lies} with a mask whose features lie over {spread.axis}", [spread, lead])
    elif spread.axis is None and lead.axis is not None and at == lead.dim and not spread.shared:
        reading.trouble(op, f"attention of heads over {lead.axis} with a mask of whole features", [spread, lead])


def product(reading: Reading, op: Op, terms: list[Term], out: str) -> None:
    """A sum of products: letters that `out` lacks are summed over."""
    if len(terms) == 2:
        for x, weight in (terms, terms[::-1]):
            view = reading.weight(weight.ref)
            shared = set(x.letters) & set(weight.letters) - set(out)
            if view is not None and reading.weight(x.ref) is None and len(shared) == 1:
                _weighted(reading, op, x, weight, view, shared.pop(), out)
                return
    result = op.results[0]
    spreads = [(term, spread) for term in terms if (spread := reading.spread(term.ref)) is not None]
    split = [(term, spread, term.letters[spread.dim]) for term, spread in spreads if spread.dim is not None]
    for _, spread, letter in split:
        reading.keep(spread)
        if letter not in out:
            reading.crossed(op, spread)
    inside = [(term, spread, letter) for term, spread, letter in split if letter in out]
    axes = {spread.axis for _, spread, _ in inside if spread.axis}
    if len(axes) > 1:
        reading.trouble(op, f"{op.name} joins features over x with features over y", [s for _, s, _ in inside])
    if not inside:
        return
    # Where keys of fewer heads were repeated, the heads of the queries are the finer ones.
    term, lead, letter = max(
        inside, key=lambda found: (found[1].axis is not None, not found[1].shared, -found[1].together)
    )
    for _, spread, where in inside:
        if where != letter and spread.axis is not None and spread.axis == lead.axis:
            reading.trouble(op, f"{op.name} joins features over {lead.axis} that lie in different dims", [lead, spread])
        elif where == letter and spread.axis is None and lead.axis is not None and not spread.shared:
            reading.trouble(op, f"{op.name} joins whole features with features over {lead.axis}", [lead, spread])
    at = out.index(letter)
    marked = _marked(lead, term.letters.index(letter))
    dims = tuple(marked if dim == at else plain(size) for dim, size in enumerate(result.shape))
    reading.put(result, Spread(lead.axis, dims, before=frozenset().union(*(spread.made_of for _, spread in spreads))))


def _weighted(reading: Reading, op: Op, x: Term, weight: Term, view: View, contracted: str, out: str) -> None:
    """A product with a parameter: a linear, or one that works inside of each unit."""
    spread, result = reading.spread(x.ref), op.results[0]
    new = [letter for letter in weight.letters if letter in out and letter not in x.letters]
    if len(new) != 1:
        flow(reading, op)
        return
    at, dim = out.index(new[0]), x.letters.index(contracted)
    if spread is not None and spread.axis and spread.dim != dim:
        reading.keep(spread)
        letter = x.letters[spread.dim or 0]
        reading.lies(op, view, spread, weight.letters.index(letter) if letter in weight.letters else None)
        dims = [plain(size) for size in result.shape]
        dims[out.index(letter)] = _marked(spread, spread.dim or 0)
        reading.put(result, Spread(spread.axis, tuple(dims), before=spread.made_of))
        return
    contract = spread.axis if spread is not None else None
    size = result.shape[at]
    output = FLIP[contract] if contract or not reading.inside_block(op.where) else "y"
    role = ROLES[contract]
    if size == 1:
        role, output = "reducing", None
    if spread is not None:
        reading.keep(spread)
        if spread.split is not None and spread.split[1] > 0 and spread.axis:
            reading.trouble(op, f"{view.name} contracts repeated features over {spread.axis}", [spread])
    layout = _layout(view, weight.letters, contracted, new[0])
    unit = spread.together if spread is not None and spread.axis else 1
    reading.linear(op, x.ref, Linear(role, contract, output, layout, op.where, unit), view.name)
    reading.put(result, fresh(output, result.shape, at, segment(view.name, size)))


def _layout(view: View, letters: str, contracted: str, new: str) -> str:
    names = {contracted: "in", new: "out"}
    dims = {at: names[letter] for at, letter in zip(view.dims, letters, strict=True) if letter in names}
    ordered = [dims.get(at, "expert") for at in sorted({0, *(at for at in dims if at is not None)})]
    return ",".join(ordered)


def _marked(spread: Spread, dim: int) -> tuple[Atom, ...]:
    """A dim's atoms, of which only the one that is split is still marked: after a product no other matters."""
    split = spread.split
    return tuple(Atom(atom.size, atom.stride if (dim, at) == split else 0) for at, atom in enumerate(spread.dims[dim]))


def _letters(count: int) -> str:
    return "abcdefgh"[:count]


HANDLERS = {
    "linear": linear,
    "addmm": addmm,
    "matmul": matmul,
    "__matmul__": matmul,
    "__rmatmul__": matmul,
    "mm": matmul,
    "bmm": matmul,
    "baddbmm": matmul,
    "grouped_mm": grouped,
    "_grouped_mm": grouped,
    "grouped_mm_fallback": grouped,
    "einsum": einsum,
    "conv1d": convolution,
    "conv2d": convolution,
    "conv3d": convolution,
    "scaled_dot_product_attention": attention,
}
