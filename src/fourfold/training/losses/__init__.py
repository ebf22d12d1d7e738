"""Losses: callables `loss(model, batch) -> (sum, count)`. None of them divides.

A loss without options is a function; one with options is a frozen dataclass that is called, and the config's section of
its name has the same fields (`subject.LOSSES`).
"""

from fourfold.training.losses.classification import classification as classification
from fourfold.training.losses.cross_entropy import cross_entropy as cross_entropy
from fourfold.training.losses.goldfish import Goldfish as Goldfish
from fourfold.training.losses.masked import masked as masked
