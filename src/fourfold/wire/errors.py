"""What can go wrong on the wire. Each message says what, where, expected, found, and one thing to try."""

from __future__ import annotations


class WireError(RuntimeError):
    """A collective could not be completed."""


class RankFailed(WireError):
    """Another rank died or raised, so this one cannot go on.

    Attributes:
        rank: the culprit.
    """

    def __init__(self, rank: int, size: int, reason: str) -> None:
        super().__init__(f"rank {rank} of {size} failed: {reason}")
        self.rank = rank


class Mismatch(WireError):
    """Ranks entered different collectives: says who differs, and how."""


class Stalled(WireError):
    """A collective did not complete in time: names the axis, the operation, the step and the missing ranks."""


class UsageError(ValueError):
    """A call that cannot be: wrong sizes, kinds, axes or layouts."""
