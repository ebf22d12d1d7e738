"""Who uses whole features: all ranks alike, or every rank for split features of its own.

A gradient that comes back from the second is partial. It is summed where the features were made: at the output of a
module that runs whole, feature by feature (of the latents of multi-head latent attention, the keys that all heads share
are used by the heads here, and the rest by a linear that sums for itself). A parameter that acts upon such features in
between (a norm's weight), or is combined with others before it does (`exp(a * b)`), has a partial gradient as well.

What a tensor is made of is followed through every function alike, whatever becomes of its dims: a gate may have been
squeezed, looked up, scattered and contracted before it meets split features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fourfold.anatomy.roles import Raw, Roles, Shared, Trouble
from fourfold.anatomy.spread import Segment


class _Use(NamedTuple):
    """Features [start, stop), used in a module: by an axis' ranks apart, or (None) by all alike."""

    where: str
    start: int
    stop: int
    axis: str | None

    def meets(self, other: _Use) -> bool:
        """They have features in common."""
        return self.start < other.stop and other.start < self.stop


class Uses:
    """What became of whole features, by what made them or acted upon them."""

    def __init__(self) -> None:
        self._found: dict[str, dict[_Use, None]] = {}
        self._within: dict[int, frozenset[Segment]] = {}

    def within(self, number: int) -> frozenset[Segment]:
        """The whole features in the tensor of this number, of which no dim tells any more."""
        return self._within.get(number, frozenset())

    def put(self, number: int, made: frozenset[Segment]) -> None:
        """Such features are in this tensor, beside those that are known to be."""
        if made:
            self._within[number] = self.within(number) | made

    def note(self, where: str, made: Iterable[Segment], axis: str | None) -> None:
        """Whole features are used in the module `where`, by ranks of an axis apart or (None) by all alike."""
        for part in made:
            self._found.setdefault(part.weight, {})[_Use(where, part.start, part.stop, axis)] = None

    def settle(self, found: Roles) -> None:
        """Say it of outputs and parameters; add a trouble where no sum would be right."""
        experts = {linear.module for linear in found.linears.values() if linear.layout.startswith("expert")}
        for name, noted in self._found.items():
            # What runs experts sums the gradients of all that it is given, over both axes.
            uses = [use._replace(axis=None) if use.where in experts else use for use in noted]
            apart = [use for use in uses if use.axis is not None]
            if not apart or not _is_whole(name, found):
                continue
            axis = apart[0].axis or ""
            amiss = [use for use in uses if use.axis != axis and any(use.meets(one) for one in apart)]
            if amiss:
                path = name.partition(":")[0]
                lies = f"with features over {amiss[0].axis}" if amiss[0].axis else "whole"
                first, other = (use.where or "the model" for use in (apart[0], amiss[0]))
                line = f"{path}: used with features over {axis} by {first}, and {lies} by {other}"
                found.troubles.append(Trouble(apart[0].where, line, frozenset([name])))
            elif name in found.linears or ":" in name:
                found.shared[name] = Shared(axis, _joined(sorted({(use.start, use.stop) for use in apart})))
            else:
                found.raw[name] = Raw(axis, False)


def _is_whole(name: str, found: Roles) -> bool:
    """An output that stays whole, or a parameter that acts upon whole features."""
    if name in found.linears:
        return found.linears[name].output is None
    return name not in found.embeddings and (name not in found.raw or not found.raw[name].spans)


def _joined(columns: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Without overlaps; they come sorted."""
    joined: list[tuple[int, int]] = []
    for start, stop in columns:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return tuple(joined)
