"""Where the rows of a batch lie in the tensors that a model drops from: two forwards, with more rows in the second.

A dim that holds rows grows with them. Where it holds other things too (batch × heads, time × batch), the order inside
it is told by the operations that made it: a reshape keeps the elements in their logical order, so the number of
elements from one row to the next says whether rows are the slowest or the fastest part of the new dim. It is not told
where rows were sorted or looked up by index (`rearranged`), or where the number of dropouts changes with the rows.

Without values the first forward can have any number of rows: a prime that no size of the model is a multiple of. Then
the dims that are multiples of it are those that would grow, and the second forward is only run if that is not clear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import count
from math import isqrt, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.anatomy.blocks import Calls
from fourfold.anatomy.rearranged import Place, Rearrangement
from fourfold.anatomy.rehearsal import Move, Rehearsal, Seen, Shape, sites
from fourfold.anatomy.twin import Twin
from fourfold.anatomy.watch import Watch
from fourfold.randomness import Layout
from fourfold.randomness.dropout import FIRST

SLOWEST, FASTEST, MIXED = "slowest", "fastest", "mixed"
APART, SHARED = Layout(0, "apart"), Layout(0, "shared")


class Forward(NamedTuple):
    """One forward: the number of rows, its dropouts by site, the operations that move rows or rearrange entries."""

    rows: int
    sites: Mapping[str, Seen]
    moves: Mapping[Place, Move]
    rearranged: Mapping[Place, Rearrangement]

    @classmethod
    def of(cls, rows: int, rehearsal: Rehearsal, blocks: Collection[str]) -> Forward:
        """What was noted during a forward; `blocks` are the paths of the blocks."""
        named = sites(rehearsal.seen, rehearsal.calls.done, blocks)
        return cls(rows, named, rehearsal.moves, rehearsal.rearrangements.found)


class Rows(NamedTuple):
    """What two forwards tell.

    Attributes:
        layouts: of the sites whose rows are not in dim 0, one after the other.
        unknown: sites whose rows cannot be told, with the reason, one line each.
    """

    layouts: dict[str, Layout]
    unknown: tuple[str, ...]


class _Dim(NamedTuple):
    """The dim that holds the rows: each has `share` entries of it, and `inner` elements follow an entry."""

    dim: int
    share: int
    inner: int


def rows_of(batch: Mapping[str, Tensor]) -> int:
    """Rows of a batch: dim 0 of its first tensor that has one; 0 if none has."""
    return next((len(tensor) for tensor in batch.values() if tensor.dim()), 0)


def with_telling_rows(attempt: Twin) -> Twin:
    """The twin with a batch of as many rows as a prime that divides no other size; if it has values, as it is.

    The prime is larger than every size of the batch and than 1000, since tensors without values cost nothing: a size
    that the model makes up itself (a table of 22 positions) is then hardly taken for rows. It is no larger than that,
    for a model may loop over its rows.
    """
    rows = rows_of(attempt.batch)
    if attempt.kind == "real" or not rows:
        return attempt
    weights = (*attempt.model.parameters(), *attempt.model.buffers())
    sizes = {size for weight in weights for size in weight.shape}
    given = {size for tensor in attempt.batch.values() for size in tensor.shape}
    above = count(max(1000, *given) + 1)
    prime = next(p for p in above if _is_prime(p) and all(size % p for size in sizes | given if size))
    batch = {
        name: tensor.new_empty((prime, *tensor.shape[1:])) if tensor.dim() and len(tensor) == rows else tensor
        for name, tensor in attempt.batch.items()
    }
    return attempt._replace(batch=batch)


def _is_prime(number: int) -> bool:
    return all(number % factor for factor in range(2, isqrt(number) + 1))


def find(
    attempt: Twin, loss: Callable[[nn.Module, Any], Any], first: Forward, blocks: Collection[str], *, grad: bool
) -> Rows:
    """Compare the first forward with one of twice its rows, which is run only if it has to be.

    Args:
        attempt: as it ran in the first forward.
        loss: of the model.
        first: what was noted then.
        blocks: paths of the blocks.
        grad: the loss needs gradients to run.
    """
    if not first.sites:
        return Rows({}, ())
    if not first.rows:
        return Rows({}, ("dropout: the batch has no rows, so nobody can tell where they lie in the model's tensors",))
    # As many dropouts as rows may be a loop over them.
    if attempt.kind != "real" and len(first.sites) < first.rows:
        if all(sum(size % first.rows == 0 for size in seen.shape) == 1 for seen in first.sites.values()):
            return compare(first, _foreseen(first))
    calls = Calls()
    rehearsal = Rehearsal(calls)
    batch = {name: _twice(tensor, first.rows) for name, tensor in attempt.batch.items()}
    try:
        with torch.set_grad_enabled(grad), attempt.mode, calls.watching(attempt.model), Watch(rehearsal), rehearsal:
            loss(attempt.model, batch)
    except Exception as error:  # it ran with fewer rows: whatever is wrong now is the model's own
        reason = (str(error).strip() or "no message").splitlines()[0]
        counts = f"the model runs with {_counted(first.rows)}, and fails with {_counted(2 * first.rows)}"
        return Rows({}, (f"dropout: where the rows lie cannot be told: {counts}: {type(error).__name__}: {reason}",))
    return compare(first, Forward.of(2 * first.rows, rehearsal, blocks), by_value=attempt.kind == "real")


def _foreseen(first: Forward) -> Forward:
    """The forward of twice the rows, if every multiple of the rows is made of rows."""

    def grown(shape: Shape) -> Shape:
        return tuple(size if size % first.rows else 2 * size for size in shape)

    seen = {site: one._replace(shape=grown(one.shape)) for site, one in first.sites.items()}
    moves = {
        place: move._replace(operands=tuple(map(grown, move.operands)), result=grown(move.result))
        for place, move in first.moves.items()
    }
    rearranged = {
        place: one._replace(along=grown(one.along), moved=grown(one.moved)) for place, one in first.rearranged.items()
    }
    return Forward(2 * first.rows, seen, moves, rearranged)


def _twice(tensor: Tensor, rows: int) -> Tensor:
    """The rows, and after them others that repeat their first entry: different, so that what hangs on values shows."""
    if not tensor.dim() or len(tensor) != rows:
        return tensor
    return torch.cat([tensor, tensor[:, :1].expand_as(tensor) if tensor.dim() > 1 else tensor])


def compare(first: Forward, second: Forward, *, by_value: bool = False) -> Rows:
    """The layout of every site of either forward; `by_value`: what runs may hang on the values in the batch."""
    orders = _Orders(first, second)
    numbered = _numbered(first, second)
    layouts: dict[str, Layout] = {}
    unknown: dict[tuple[str, str], list[str]] = {}
    unsettled: set[str] = set()
    for site in dict.fromkeys((*first.sites, *second.sites)):
        one, two = first.sites.get(site), second.sites.get(site)
        scope, module = site.partition("#")[0], (one or two).module or "the model"  # type: ignore[union-attr]
        layout, why = APART, ""
        if one is None or two is None or one.module != two.module or one.module not in numbered:
            why = "which dropouts run, or how many, hangs on the number of rows, on values or chance"
        elif why := _rearranged(one, two, first, second):
            unsettled |= {scope} if by_value else set()
        elif scope in unsettled:
            why = "how many dropouts run before it may hang on values"
        else:
            orders.learn(one.moved)
            layout, why = orders.layout(one.shape, two.shape)
        if layout != FIRST:
            layouts[site] = layout
        if why:
            unknown.setdefault((module, why), []).append(site)
    return Rows(layouts, tuple(_line(module, why, sites) for (module, why), sites in unknown.items()))


def _line(module: str, why: str, sites: list[str]) -> str:
    more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
    return f"{module} drops out (site {sites[0]}{more}): {why}"


def _numbered(first: Forward, second: Forward) -> set[str]:
    """Modules that draw as often in one forward as in the other."""
    draws = [Counter(seen.module for seen in forward.sites.values()) for forward in (first, second)]
    return {module for module, times in draws[0].items() if draws[1][module] == times}


def _rearranged(one: Seen, two: Seen, first: Forward, second: Forward) -> str:
    """Why the order of the rows in what is dropped from cannot be told, "" if nothing rearranged them."""
    places = [place for place in one.rearranged | two.rearranged if _moves_rows(place, first, second)]
    if not places:
        return ""
    module, ordinal = min(places)
    found = first.rearranged.get((module, ordinal)) or second.rearranged[module, ordinal]
    return f"rows were rearranged by {found.kind} in {module or 'the model'}"


def _moves_rows(place: Place, first: Forward, second: Forward) -> bool:
    """What an operator rearranges grows with the rows, or it ran in one of the forwards only."""
    one, two = first.rearranged.get(place), second.rearranged.get(place)
    if one is None or two is None or one.kind != two.kind:
        return True
    return one.along != two.along and one.moved != two.moved


class _Orders:
    """The order inside the dims that hold rows and more, by the number of dims and the two sizes of the dim.

    What a forward does later does not matter to a dropout: it is asked for what was learnt until then.
    """

    def __init__(self, first: Forward, second: Forward) -> None:
        self.rows = first.rows, second.rows
        self.known: dict[tuple[int, int, int], str] = {}
        self._moves = [(one, second.moves.get(place)) for place, one in first.moves.items()]
        self._learnt = 0

    def learn(self, moved: int) -> None:
        """Take in the first forward's moves up to number `moved`."""
        for one, two in self._moves[self._learnt : moved]:
            if two is not None and two.kind == one.kind and len(two.operands) == len(one.operands):
                self._learn(one, two)
        self._learnt = max(self._learnt, moved)

    def layout(self, one: Shape, two: Shape) -> tuple[Layout, str]:
        """How the rows lie in a tensor of these two shapes, and why that cannot be told ("" if it can)."""
        shapes = f"{one} for {_counted(self.rows[0])}, {two} for {_counted(self.rows[1])}"
        if one == two and prod(one):
            return SHARED, ""
        held = self._held(one, two)
        if held is None:
            return APART, f"its tensor is no whole number of entries of one dim a row: {shapes}"
        order = self._order(one, two, held)
        if order == MIXED or (order is None and {FASTEST, MIXED} & set(self.known.values())):
            return APART, f"rows and other things share dim {held.dim} in an order that cannot be told: {shapes}"
        return Layout(held.dim, order or SLOWEST), ""

    def _held(self, one: Shape, two: Shape) -> _Dim | None:
        grown = [dim for dim, sizes in enumerate(zip(one, two, strict=False)) if sizes[0] != sizes[1]]
        if len(one) != len(two) or len(grown) != 1:
            return None
        dim = grown[0]
        share, rest = divmod(one[dim], self.rows[0])
        if rest or share * self.rows[1] != two[dim]:
            return None
        return _Dim(dim, share, prod(one[dim + 1 :]))

    def _order(self, one: Shape, two: Shape, held: _Dim) -> str | None:
        return SLOWEST if held.share == 1 else self.known.get((len(one), one[held.dim], two[held.dim]))

    def _learn(self, one: Move, two: Move) -> None:
        made = self._held(one.result, two.result)
        if made is None or made.share == 1:
            return
        found = self._reshaped(one, two, made) if one.kind == "reshape" else self._joined(one, two, made)
        if found is not None:
            key = len(one.result), one.result[made.dim], two.result[made.dim]
            self.known[key] = found if self.known.get(key, found) == found else MIXED

    def _reshaped(self, one: Move, two: Move, made: _Dim) -> str | None:
        held = self._held(one.operands[0], two.operands[0])
        if held is None:
            return None
        order = self._order(one.operands[0], two.operands[0], held) or SLOWEST
        if order == MIXED:
            return MIXED
        step = held.inner * (held.share if order == SLOWEST else 1)
        return {made.share * made.inner: SLOWEST, made.inner: FASTEST}.get(step, MIXED)

    def _joined(self, first: Move, second: Move, made: _Dim) -> str | None:
        """A cat or repeat of rows along their dim: the copies are slower than the rows in each."""
        pairs = list(zip(first.operands, second.operands, strict=True))
        parts = [(one, two, held) for one, two in pairs if (held := self._held(one, two)) is not None]
        if not parts or (first.kind == "cat" and first.dim != made.dim):
            return None
        alone = all(held.share == 1 or self._order(one, two, held) == FASTEST for one, two, held in parts)
        if len(parts) == 1 and parts[0][2].share == made.share:
            return self._order(*parts[0])
        return FASTEST if alone else MIXED


def _counted(rows: int) -> str:
    return f"{rows} row{'' if rows == 1 else 's'}"
