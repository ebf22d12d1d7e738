"""Tensors that have no features of their own, as every rank has them: weights, buffers, and what modules are given.

They are followed through views, until they join features: then it shows along which of their dims these lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fourfold.anatomy.transcript import Ref, Transcript


class View(NamedTuple):
    """Such a tensor, or a view of it.

    Attributes:
        name: of the parameter or the buffer, or path of the module that is given it.
        dims: which of its dims each dim is (None: none, -1: several).
        rank: how many dims it has.
        fixed: it is no parameter.
        place: among the floating tensors that the module is given; None: a parameter or a buffer.
    """

    name: str
    dims: tuple[int | None, ...]
    rank: int
    fixed: bool = False
    place: int | None = None


class Bystanders:
    """Which tensors of a transcript are such, at the point to which it was read."""

    def __init__(self, transcript: Transcript, sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Parameters, of which the sizes are known, and buffers are from the start."""
        self._views = {number: _all(name, len(sizes[name])) for number, name in transcript.parameters.items()}
        for number, (name, rank) in transcript.buffers.items():
            self._views[number] = _all(name, rank)._replace(fixed=True)
        self._before: list[dict[int, View | None]] = []

    def view(self, ref: Ref) -> View | None:
        """What a tensor is a view of."""
        return self._views.get(ref.number)

    def put(self, ref: Ref, view: View) -> None:
        """From here on a tensor is this view."""
        self._views[ref.number] = view

    def enter(self, path: str, given: Iterable[tuple[int, Ref]]) -> None:
        """A module is given these, by their places: until it ends they are its own to be dealt."""
        before: dict[int, View | None] = {}
        for place, ref in given:
            view = self._views.get(ref.number)
            if view is None or view.fixed:
                before.setdefault(ref.number, view)
                self._views[ref.number] = _all(path, len(ref.shape))._replace(fixed=True, place=place)
        self._before.append(before)

    def leave(self) -> None:
        """The module that was entered last ends."""
        for number, view in self._before.pop().items():
            if view is None:
                del self._views[number]
            else:
                self._views[number] = view


def _all(name: str, rank: int) -> View:
    return View(name, tuple(range(rank)), rank)
