"""Randomness as a function of logical coordinates, never of rank, stage or world size.

`philox` has the streams, `dropout` the masks at an ambient position, `streams` the mode that makes a stock model use
them. Below `training`, nothing touches torch's default generator.
"""

from fourfold.randomness.cut import Cut
from fourfold.randomness.dropout import FIRST, Layout, Position, Window, at, current, dropout, threshold
from fourfold.randomness.philox import RandomnessError, bits, normal, permutation, uniform
from fourfold.randomness.streams import Streams, inside, skip

__all__ = [
    "FIRST",
    "Cut",
    "Layout",
    "Position",
    "RandomnessError",
    "Streams",
    "Window",
    "at",
    "bits",
    "current",
    "dropout",
    "inside",
    "normal",
    "permutation",
    "skip",
    "threshold",
    "uniform",
]
