"""float16: 11 bits of precision, but only up to 65,504: gradients of a scaled loss may overflow, where bf16 does not.

Relative error at most 2⁻¹¹ an element in the normal range (above 6.1e-5); below it the absolute error is at most 2⁻²⁵.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fourfold.wire.codecs._cast import Cast


@dataclass(frozen=True)
class Options:
    """fp16 has no settings."""


class Codec(Cast):
    """Two bytes an element; 10 stored bits of mantissa."""

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(torch.float16, mantissa=10)
