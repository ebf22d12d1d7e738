"""What a plain model is: its blocks in order, ties, roles of linears, and initialisers."""

from fourfold.anatomy.survey import Anatomy, AnatomyError, survey
from fourfold.anatomy.ties import own_names, ties

__all__ = ["Anatomy", "AnatomyError", "own_names", "survey", "ties"]
