"""Losses: callables `loss(model, batch) -> (sum, count)`. None of them divides."""

from fourfold.training.losses.classification import classification as classification
from fourfold.training.losses.cross_entropy import cross_entropy as cross_entropy
from fourfold.training.losses.masked import masked as masked
