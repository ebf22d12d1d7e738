"""How fast, against how fast it could be: FLOPs of a step over the matrix-product peak measured on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from fourfold.placement.precision import Precision
from fourfold.torch_private import dispatch_mode, fake_mode
from fourfold.training.step import Loss

TRIES = {"cpu": {512: 32, 1024: 8}, "cuda": {8192: 32}}
"""Sides of square products → how many; the best rate counts as the peak. On a busy machine the others measure the
neighbours: a small product is done within one time slice (3 ms) and reached 160 GFLOP/s where all of 1024 were
interrupted and reached 60 to 90; of large ones a few tell."""


@dataclass(frozen=True)
class Throughput:
    """What a rate is compared with.

    Attributes:
        flops: of forward and backward of one step's global batch, without recomputation (an algorithm's choice to
            compute twice is no use of the machine).
        peak: FLOP/s of one rank's matrix products, in the compute type and threads of the run.
        ranks: how many ranks share the step.
    """

    flops: float
    peak: float
    ranks: int

    def utilisation(self, seconds: float) -> float:
        """Model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B) of a step that took `seconds`."""
        return self.flops / (seconds * self.peak * self.ranks)


def flops_of(model: nn.Module, loss: Loss, batch: Mapping[str, Tensor]) -> int:
    """FLOPs of forward and backward on `batch`, counted without values: products and convolutions, 2 a multiply-add.
    Attention counts the whole square, causal or not.

    Tensors are fake ones: models of transformers ask whether they are, and then look at no values of theirs.

    Args:
        model: on the meta device; its gradients are dropped again.
        loss: as everywhere.
        batch: one row is enough, the count is linear in rows.
    """
    with fake_mode(), _Flops() as counter:
        inputs = {name: torch.empty_like(tensor, device="meta") for name, tensor in batch.items()}
        total, _ = loss(model, inputs)
        total.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return counter.total


class _Flops(dispatch_mode()):
    """Adds up what torch knows of each operator.

    Its own `FlopCounterMode` sorts by module, with hooks of the whole process: in the forwards of ranks on other
    threads they register hooks of tensors, which a rehearsal there takes for the model's.
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count: Callable[..., int] | None = flop_registry.get(getattr(func, "overloadpacket", func))
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


def estimated_flops(model: nn.Module, tokens: int) -> int:
    """FLOPs of forward and backward by 6 a parameter and token (Kaplan et al. 2020, section 2.1), without attention."""
    return 6 * sum(parameter.numel() for parameter in model.parameters()) * tokens


def gemm_peak(precision: str, device: torch.device) -> float:
    """FLOP/s of a large square product in the type that a plan's `precision` computes in, with torch's threads."""
    dtype = Precision.of(precision, device).compute
    return max(_rate(size, tries, dtype, device) for size, tries in TRIES.get(device.type, {1024: 32}).items())


def _rate(size: int, tries: int, dtype: torch.dtype, device: torch.device) -> float:
    left, right = (torch.rand(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / min(_seconds(left, right, out) for _ in range(tries))


def _seconds(left: Tensor, right: Tensor, out: Tensor) -> float:
    began = time.perf_counter()
    torch.mm(left, right, out=out)
    if out.device.type == "cuda":
        torch.cuda.synchronize(out.device)
    return time.perf_counter() - began
