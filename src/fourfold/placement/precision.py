"""In which type weights rest, move and compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Precision:
    """Element types.

    Attributes:
        master: of the stored shard, the summed gradient and the optimizer's state.
        message: of weights at rest in full form and of weights and gradients on the wire.
        compute: of the weights that a forward sees.
    """

    master: torch.dtype
    message: torch.dtype
    compute: torch.dtype

    @classmethod
    def of(cls, name: str, device: torch.device) -> Precision:
        """The types behind a plan's `precision` on a device.

        bf16 without bf16 units is upcast for compute: a bf16 matmul is up to 100 times slower than an fp32 one on
        a CPU that emulates it, so there bf16 is what moves and rests, and compute is fp32.
        """
        if name == "fp64":
            return cls(torch.float64, torch.float64, torch.float64)
        if name == "fp32":
            return cls(torch.float32, torch.float32, torch.float32)
        return cls(torch.float32, torch.bfloat16, torch.bfloat16 if computes_bf16(device) else torch.float32)

    @property
    def upcast(self) -> bool:
        """Weights rest in a narrower type than they compute in."""
        return self.message != self.compute


@cache
def computes_bf16(device: torch.device) -> bool:
    """The device multiplies bf16 matrices in hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        capability = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        return bool(capability.get("avx512_bf16") or capability.get("amx_bf16") or capability.get("bf16"))
    return True
