"""Tensors that are this rank's part of a sum over an axis which is taken later: what may be done with them before it.

A sum of sums is a sum, and a scaled sum the sum of what is scaled. Anything else would do to the parts what it does not
do to their sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor

from fourfold.torch_private import leaves

PLUS = frozenset("__add__ __iadd__ __radd__ add add_".split())
ADDED = PLUS | frozenset("cat index_add index_add_ scatter_add scatter_add_ stack".split())
"""Sums of parts, and of nothing with parts."""

SCALED = frozenset("__imul__ __mul__ __rmul__ mul mul_ multiply".split())
"""Products of one part with what is no part."""

MOVED = frozenset(
    "__get__ __getitem__ bfloat16 clone contiguous dim double flatten float gather half index_select movedim permute "
    "reshape size squeeze sum swapaxes t to transpose type type_as unflatten unsqueeze view view_as".split()
)
"""What moves, casts or adds up the elements of one part; numbers among the arguments are dims and sizes."""

NOTHING = frozenset("new_zeros zeros zeros_like".split())


class Partials:
    """Which tensors are parts, in one call of a module."""

    def __init__(self) -> None:
        self._parts = _Marks()
        self._nothing = _Marks()

    def mark(self, part: Tensor) -> Tensor:
        """From here on this tensor is a part."""
        self._parts.add(part)
        return part

    def is_part(self, value: Any) -> bool:
        """Whether the tensor is one."""
        return value in self._parts

    def allows(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a function does to a sum what it does to its parts."""
        given = _floating((args, dict(kwargs)))
        parts = sum(map(self.is_part, given))
        if not parts or name in MOVED:
            return True
        if name in ADDED:
            number = name in PLUS and any(isinstance(value, int | float) for value in args)
            return not number and all(one in self._parts or one in self._nothing for one in given)
        return name in SCALED and parts == 1

    def note(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """What the function gave is a part if it was given one."""
        if any(map(self.is_part, _floating((args, dict(kwargs))))):
            for made in _floating(result):
                self._parts.add(made)
        elif name in NOTHING:
            for made in _floating(result):
                self._nothing.add(made)
        elif args and (result is args[0] or name == "__setitem__"):
            self._nothing.drop(args[0])  # it was filled in place


class _Marks:
    """A set of tensors by identity, which keeps none of them alive."""

    def __init__(self) -> None:
        self._known: dict[int, ref[Tensor]] = {}

    def __contains__(self, value: object) -> bool:
        known = self._known.get(id(value))
        return known is not None and known() is value

    def add(self, tensor: Tensor) -> None:
        """Mark it."""
        self._known[id(tensor)] = ref(tensor)

    def drop(self, value: object) -> None:
        """Mark it no longer."""
        self._known.pop(id(value), None)


def _floating(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
