"""What the casts to a 16-bit float have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Cast:
    """Round to a narrower float, to nearest, ties to even. Stateless, and a projection."""

    exact = False
    rides_allreduce = True

    def __init__(self, form: torch.dtype, mantissa: int) -> None:
        self.form = form
        # |x − C(x)| ≤ 2^−(mantissa + 1) |x| for normal numbers, so the squared error is at most its square.
        self.contraction = 1.0 - 2.0 ** (-2 * (mantissa + 1))

    def encode(self, tensor: Tensor) -> Tensor:
        """The rounded tensor, flat."""
        return tensor.reshape(-1).to(self.form)

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The payload widened to `dtype`."""
        return payload[:numel].to(dtype)

    def wire_bytes(self, numel: int, itemsize: int) -> int:
        """Two bytes an element, whatever it was before."""
        return 2 * numel

    def state_dict(self) -> dict[str, Any]:
        """Empty: a cast remembers nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accepts what `state_dict` gave."""
        if state:
            raise ValueError(f"codec state: a cast has none, found {', '.join(map(str, state))}")
