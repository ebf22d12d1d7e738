"""What a plain model is: its blocks in order, ties, roles of linears, and initialisers."""

from fourfold.anatomy.initialisers import Initialiser, Recording, deferred, initialiser, materialize, recorded
from fourfold.anatomy.plain import restored
from fourfold.anatomy.replay import InitialiserError
from fourfold.anatomy.roles import BATCH_NORMS, BatchNorm, Beside, Dropout, Linear, Norm, Raw, Shared, Whole
from fourfold.anatomy.survey import Anatomy, AnatomyError, survey
from fourfold.anatomy.ties import own_names, ties

__all__ = [
    "BATCH_NORMS",
    "Anatomy",
    "AnatomyError",
    "BatchNorm",
    "Beside",
    "Dropout",
    "Initialiser",
    "InitialiserError",
    "Linear",
    "Norm",
    "Raw",
    "Recording",
    "Shared",
    "Whole",
    "deferred",
    "initialiser",
    "materialize",
    "own_names",
    "recorded",
    "restored",
    "survey",
    "ties",
]
