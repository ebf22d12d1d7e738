"""Floating buffers that training changes: running statistics and averages, which no gradient tells of."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn


def digest(value: Tensor | str, before: int = 0) -> int:
    """A checksum of a tensor's bytes or of a name, continuing that of what came before."""
    if isinstance(value, str):
        return zlib.crc32(value.encode(), before)
    plain = value.detach().contiguous().cpu().reshape(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().tobytes(), before)


class Watch:
    """Looks at a model's floating buffers after every step.

    A buffer whose shape has changed is a cache of what the model computes anew, and not looked at.

    Attributes:
        changed: names of those that have differed, bit for bit, from what they were when the watch began.
        digests: checksum by name over what every `look` found, of those that have changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.changed: set[str] = set()
        self.digests: dict[str, int] = {}
        self._first = {name: (value.shape, digest(value)) for name, value in self._floating().items()}

    def look(self) -> None:
        """A step was taken."""
        for name, value in self.values().items():
            now = digest(value)
            if now != self._first[name][1]:
                self.changed.add(name)
            if name in self.changed:
                self.digests[name] = digest(value, self.digests.get(name, 0))

    def values(self) -> dict[str, Tensor]:
        """All that are looked at, by name."""
        found = self._floating()
        return {name: found[name] for name, (shape, _) in self._first.items() if _shape(found.get(name)) == shape}

    def _floating(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.model.named_buffers() if value.is_floating_point()}


def _shape(value: Tensor | None) -> torch.Size | None:
    return None if value is None else value.shape
