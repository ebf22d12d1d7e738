"""Checkpoints: logical names and shapes only, so that any plan's checkpoint loads under any other.

A tensor is a list of boxes per rank. Each writer's boxes lie in one safetensors file; a JSON manifest names every box
with its hash, and holds the rest of the run's state. Nothing is ever pickled. A checkpoint has its final name only when
all of it is on the disk.
"""

from fourfold.training.checkpoint.box import Box
from fourfold.training.checkpoint.errors import CheckpointError, Corrupted, DiskFull, ReadOnly, WriterLost
from fourfold.training.checkpoint.folder import prepare
from fourfold.training.checkpoint.reader import load
from fourfold.training.checkpoint.saving import Saving, save
from fourfold.training.checkpoint.verification import latest

__all__ = [
    "Box",
    "CheckpointError",
    "Corrupted",
    "DiskFull",
    "ReadOnly",
    "Saving",
    "WriterLost",
    "latest",
    "load",
    "prepare",
    "save",
]
