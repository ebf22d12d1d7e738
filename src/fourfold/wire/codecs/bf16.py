"""bfloat16: the range of float32 with 8 bits of precision. Relative error at most 2⁻⁸ an element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fourfold.wire.codecs._cast import Cast


@dataclass(frozen=True)
class Options:
    """bf16 has no settings."""


class Codec(Cast):
    """Two bytes an element; 7 stored bits of mantissa."""

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(torch.bfloat16, mantissa=7)
