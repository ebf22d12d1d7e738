"""Over which dims of a tensor the features lie that an axis of the grid splits, through views of any kind.

The features of a linear's output are counted in mixed radix: a view from (…, N) to (…, H, d) writes feature n as
(n // d, n % d). An `Atom` is one digit: how many values it has, and how many features apart two neighbours are. Every
dim is a row of atoms, the slowest first; an atom of stride 0 counts something else (rows, time). An axis splits the
atom of the largest stride; what the others count stays together, and is a unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Atom(NamedTuple):
    """A digit of the position in a dim: its number of values, and the features from one to the next (0: none)."""

    size: int
    stride: int = 0


Dim = tuple[Atom, ...]


class Segment(NamedTuple):
    """Features [start, stop) of the output of the linear with this weight."""

    weight: str
    start: int
    stop: int


class Spread(NamedTuple):
    """Where the features of a tensor lie.

    Attributes:
        axis: that splits them; None if they are whole.
        dims: the atoms of every dim.
        sources: what the features are, as long as nothing has mixed them.
        before: of what is mixed into them.
    """

    axis: str | None
    dims: tuple[Dim, ...]
    sources: frozenset[Segment] = frozenset()
    before: frozenset[Segment] = frozenset()

    @property
    def made_of(self) -> frozenset[Segment]:
        """All that is known to be in these features, mixed or not."""
        return self.sources | self.before

    @property
    def makers(self) -> frozenset[str]:
        """The weights that are known to have made these features."""
        return frozenset(segment.weight for segment in self.made_of)

    @property
    def split(self) -> tuple[int, int] | None:
        """(dim, place in it) of the atom that the axis splits; None if the tensor has no features."""
        strides = [(atom.stride, -dim, -at) for dim, atoms in enumerate(self.dims) for at, atom in enumerate(atoms)]
        largest = max(strides, default=(0, 0, 0))
        return (-largest[1], -largest[2]) if largest[0] else None

    @property
    def dim(self) -> int | None:
        """The dim that the axis splits."""
        return self.split[0] if self.split else None

    @property
    def apart(self) -> int:
        """Features from one value of the split atom to the next: of a source, these stay together."""
        if self.split is None:
            return 1
        dim, at = self.split
        return self.dims[dim][at].stride

    @property
    def together(self) -> int:
        """Entries of the split dim that stay together."""
        if self.split is None:
            return 1
        dim, at = self.split
        return prod(atom.size for atom in self.dims[dim][at + 1 :])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return tuple(prod(atom.size for atom in dim) for dim in self.dims)

    @property
    def shared(self) -> bool:
        """There is one unit only, which every rank of the axis has."""
        return self.split is not None and self.dims[self.split[0]][self.split[1]].size == 1


def plain(size: int) -> Dim:
    """A dim without features."""
    return () if size == 1 else (Atom(size),)


def fresh(axis: str | None, shape: Sequence[int], dim: int, sources: frozenset[Segment] = frozenset()) -> Spread:
    """A tensor of this shape whose dim `dim` holds the features, one an entry."""
    dim %= len(shape)
    dims = tuple((Atom(size, 1),) if at == dim else plain(size) for at, size in enumerate(shape))
    return Spread(axis, dims, sources)


def reshaped(spread: Spread, shape: Sequence[int]) -> Spread | None:
    """After a view that keeps the logical order of elements; None if a new dim would cut an atom unevenly."""
    waiting: deque[Atom] = deque()
    for atom in (atom for dim in spread.dims for atom in dim):
        if waiting and not waiting[-1].stride and not atom.stride:
            waiting[-1] = Atom(waiting[-1].size * atom.size)
        else:
            waiting.append(atom)
    dims = []
    for size in shape:
        taken = _taken(waiting, size)
        if taken is None:
            return None
        dims.append(taken)
    return spread._replace(dims=tuple(dims))


def _taken(waiting: deque[Atom], size: int) -> Dim | None:
    taken = []
    if size == 1 and waiting and waiting[0].size == 1:
        return (waiting.popleft(),)
    while size > 1:
        if not waiting:
            return None
        atom = waiting.popleft()
        if size % atom.size == 0:
            taken.append(atom)
            size //= atom.size
        elif atom.size % size == 0:
            rest = atom.size // size
            taken.append(Atom(size, atom.stride * rest))
            waiting.appendleft(Atom(rest, atom.stride))
            size = 1
        else:
            return None
    return tuple(taken)


def single(spread: Spread, shape: Sequence[int]) -> Spread:
    """After a view from (…, N) to (…, 1, N), which says that all N features are those of a single head."""
    dim = spread.dim
    if dim is None or len(shape) <= len(spread.dims) or len(spread.dims[dim]) != 1:
        return spread
    atom, shift = spread.dims[dim][0], len(shape) - len(spread.dims)
    if atom.stride != 1 or shape[dim + shift] != atom.size or shape[dim + shift - 1] != 1:
        return spread
    return _with_dim(spread, dim, (Atom(1, atom.size), atom))


def permuted(spread: Spread, order: Sequence[int]) -> Spread:
    """With its dims in another order."""
    return spread._replace(dims=tuple(spread.dims[dim] for dim in order))


def cut(spread: Spread, dim: int, start: int, length: int, step: int = 1) -> Spread:
    """Entries start, start + step, … of a dim, `length` of them; the sources shrink with the split atom."""
    atoms = spread.dims[dim]
    if length == prod(atom.size for atom in atoms):
        return spread
    if not any(atom.stride for atom in atoms):
        return _with_dim(spread, dim, plain(length))
    first, inner = atoms[0], prod(atom.size for atom in atoms[1:])
    if step == 1 and start % inner == 0 and length % inner == 0:
        left, low, high = (Atom(length // inner, first.stride), *atoms[1:]), start // inner, (start + length) // inner
    else:
        first = atoms[-1]
        left, low, high = (Atom(length, first.stride * step),), start, start + length
    cut = _with_dim(spread, dim, left)
    if spread.split != (dim, 0) or step != 1:
        return cut
    width = first.stride
    return cut._replace(
        sources=frozenset(Segment(s.weight, s.start + low * width, s.start + high * width) for s in spread.sources)
    )


def _with_dim(spread: Spread, dim: int, atoms: Dim) -> Spread:
    return spread._replace(dims=(*spread.dims[:dim], atoms, *spread.dims[dim + 1 :]))


def dropped(spread: Spread, dims: Sequence[int]) -> Spread:
    """Without these dims."""
    gone = {dim % len(spread.dims) for dim in dims}
    return spread._replace(dims=tuple(atoms for dim, atoms in enumerate(spread.dims) if dim not in gone))


def aligned(spread: Spread, shape: Sequence[int]) -> Spread | None:
    """Broadcast to `shape`; None if features would have to change their number."""
    shift = len(shape) - len(spread.dims)
    if shift < 0:
        return None
    dims = []
    for at, size in enumerate(shape):
        atoms = spread.dims[at - shift] if at >= shift else ()
        have = prod(atom.size for atom in atoms)
        marked = any(atom.stride for atom in atoms)
        if have not in (1, size) and marked:
            return None
        dims.append(atoms if have == size else (*atoms, *plain(size)) if marked else plain(size))
    return spread._replace(dims=tuple(dims))
