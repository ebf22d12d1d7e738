"""Draw again what was drawn here: for pieces of a forward that backward runs a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fourfold.randomness.dropout import at, current
from fourfold.randomness.streams import Streams, entered, innermost


def capture() -> Callable[[], AbstractContextManager[None]]:
    """Remember the ambient position and the innermost scope; what is returned re-enters both, as often as called.

    The first entry uses up the sites that it draws at, so that what follows in the scope gets the names that it would
    have had without it; later entries repeat the same sites.
    """
    scope, position = innermost(), current()
    if scope is None or position is None:
        return nullcontext
    prefix, ordinal = scope.prefix, scope.ordinal

    @contextmanager
    def again() -> Iterator[None]:
        twin = Streams(prefix)
        twin.ordinal = ordinal
        with at(position), entered(twin):
            yield
        if scope.prefix == prefix:
            scope.ordinal = max(scope.ordinal, twin.ordinal)

    return again
