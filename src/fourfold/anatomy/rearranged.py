"""Which tensors hold rows in an order that no shape tells: what sorting, indexing and their like did.

A reshape or a transpose keeps to an order that sizes tell (`rows`). `x[permutation]`, a flip or a gather does not, and
neither does what is computed from their results, until these are put back: by index into a tensor that is in order
(`index_add_`), or by the inverse of the permutation, as mixtures of experts do both. Whether it was rows that an
operator rearranged is seen later: the dim along which it works grows with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.torch_private import leaves, storage_key

aten = torch.ops.aten
Place = tuple[str, int]
Given = dict[str, Any]
InOrder = Callable[[Any], bool]


class Rearrangement(NamedTuple):
    """An operator that puts entries of a dim in an order of its own.

    Attributes:
        kind: name of the operator.
        along: sizes of the dims along which it does.
        moved: sizes of what it moves there.
    """

    kind: str
    along: tuple[int, ...]
    moved: tuple[int, ...]


class Rearrangements:
    """What one forward rearranged.

    Attributes:
        found: the operators by module and ordinal in it, in order.
    """

    def __init__(self) -> None:
        self.found: dict[Place, Rearrangement] = {}
        self._counts: Counter[str] = Counter()
        self._touched: dict[int, frozenset[Place]] = {}
        self._in_order: set[int] = set()
        self._permutations: set[int] = set()
        self._inverses: dict[int, frozenset[Place]] = {}  # of a permutation → what that one comes from
        self._through: dict[Place, frozenset[Place]] = {}  # a look-up → what its index comes from
        self._kept: list[Tensor] = []  # a storage's key is its own only while it lives

    def of(self, values: Any) -> frozenset[Place]:
        """The operators whose results the tensors in `values` come from; predicates (masks) have no order to lose."""
        if not self._touched:
            return frozenset()
        places = (self._touched.get(storage_key(value), frozenset()) for value in _tensors(values))
        return frozenset().union(*places)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, module: str) -> None:
        """Take in one operator, below autograd."""
        packet = func.overloadpacket
        if packet is aten.arange and func in _COUNTING:
            self._keep(result, self._in_order.add)
            return
        along = _ALONG.get(packet)
        if along is None and not self._touched:
            return
        if packet in _FRESH:
            return
        given = _named(func, args, kwargs) if along else {}
        if not given:
            places = self.of((args, kwargs))
        else:
            places = (self._put if packet in _PUTS else self._got)(packet, given, result, module)
        if places:
            self._keep(result, lambda key: self._touched.update({key: self._touched.get(key, frozenset()) | places}))

    def _put(self, packet: Any, given: Given, result: Tensor, module: str) -> frozenset[Place]:
        """Where a tensor comes from that was written to by index: in the order of what it was before, or in none."""
        values = given.get("values", given.get("src", given.get("source")))
        index = list(_tensors(given.get("indices", given.get("index"))))
        if len(index) == 1 and storage_key(index[0]) in self._permutations and self._is_in_order(values):
            self._inverses[storage_key(result)] = self.of(index)
        before = self.of(given["self"])
        if self.of(values):  # put back
            return before
        return before | self._new(packet, given, tuple(values.shape) if isinstance(values, Tensor) else (), module)

    def _got(self, packet: Any, given: Given, result: Any, module: str) -> frozenset[Place]:
        """Where a tensor comes from that was looked up: the source and the index, or what is left once put back."""
        index = list(_tensors((given.get("indices"), given.get("index"))))
        undone = self._inverses.get(storage_key(index[0])) if len(index) == 1 else None
        if undone:
            return frozenset(
                place
                for place in self.of(given["self"])
                if not (place in undone or self._through.get(place, frozenset()) & undone)
            )
        if packet is aten.sort:
            self._permutations.add(storage_key(result[1]))
            if storage_key(given["self"]) in self._permutations:  # an argsort of an argsort
                self._inverses[storage_key(result[1])] = self.of(given["self"])
        new = self._new(packet, given, tuple(given["self"].shape), module)
        self._through.update((place, self.of(index)) for place in new)
        return self.of((given["self"], index)) | new

    def _new(self, packet: Any, given: Given, moved: tuple[int, ...], module: str) -> frozenset[Place]:
        """The operator as one of `found`, if it works along any dim."""
        source: Tensor = given["self"]
        dims = [dim % source.dim() for dim in _ALONG[packet](given, self._is_in_order)] if source.dim() else []
        if not dims or source.dtype == torch.bool:
            return frozenset()
        place = module, self._counts[module]
        self._counts[module] += 1
        name = packet.__name__.strip("_")
        self.found[place] = Rearrangement(name, tuple(source.shape[dim] for dim in dims), moved)
        return frozenset({place})

    def _is_in_order(self, index: Any) -> bool:
        """It counts up from entry to entry: a transposed view of such an index does not."""
        return isinstance(index, Tensor) and index.is_contiguous() and storage_key(index) in self._in_order

    def _keep(self, result: Any, note: Callable[[int], Any]) -> None:
        for tensor in _tensors(result):
            if tensor.dim():
                self._kept.append(tensor)
                note(storage_key(tensor))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (
        value
        for value in leaves(values)
        if isinstance(value, Tensor) and value.layout == torch.strided and value.dtype != torch.bool
    )


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _one(given: Given, _: InOrder) -> list[int]:
    return [given.get("dim", -1)]


def _all(given: Given, _: InOrder) -> list[int]:
    return list(range(given["self"].dim()))


def _dims(given: Given, _: InOrder) -> list[int]:
    return list(given.get("dims") or range(given["self"].dim()))


def _selected(given: Given, in_order: InOrder) -> list[int]:
    return [] if in_order(given["index"]) else [given["dim"]]


def _indexed(given: Given, in_order: InOrder) -> list[int]:
    """The dims that `x[a, b, :]` looks up; a mask stands for as many dims as it has, and 0, 1, 2, … changes nothing."""
    dims, dim = [], 0
    for index in given["indices"]:
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        width = index.dim() if index is not None and masks else 1
        if index is not None and (masks or not in_order(index)):
            dims.extend(range(dim, dim + width))
        dim += width
    return dims


def _strided(given: Given, _: InOrder) -> list[int]:
    source: Tensor = given["self"]
    same = tuple(given["size"]) == tuple(source.shape) and tuple(given["stride"]) == source.stride()
    return [] if same else list(range(source.dim()))


_PUTS: dict[Any, Callable[[Given, InOrder], list[int]]] = {
    aten.index_put: _indexed,
    aten.index_put_: _indexed,
    aten.index_copy: _selected,
    aten.index_copy_: _selected,
    aten.index_add: _selected,
    aten.index_add_: _selected,
    aten.scatter: _one,
    aten.scatter_: _one,
    aten.scatter_add: _one,
    aten.scatter_add_: _one,
    aten.scatter_reduce: _one,
    aten.scatter_reduce_: _one,
}
"""They write by index: in another order, or back in the order of the tensor that they write to."""

_ALONG: dict[Any, Callable[[Given, InOrder], list[int]]] = {
    **_PUTS,
    aten.index: _indexed,
    aten.index_select: _selected,
    aten.gather: _one,
    aten.sort: _one,
    aten.topk: _one,
    aten.flip: _dims,
    aten.roll: _dims,
    aten.take: _all,
    aten.masked_select: _all,
    aten.as_strided: _strided,
}
"""The dims along which an operator rearranges its first operand."""

_FRESH = {
    aten.empty_like,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.new_empty,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
}
"""Of their operand they take the sizes alone."""

_COUNTING = (aten.arange.default, aten.arange.start)
"""Their results are 0, 1, 2, … or follow one another as these do."""
