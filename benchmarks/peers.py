"""Torch's own parallel training, set up as its documentation advises: what `speed.py` measures fourfold beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from fourfold.models.gpt import GPT
from fourfold.training.losses.cross_entropy import cross_entropy

RATE, DECAY = 1e-4, 0.01
"""Of AdamW; vectors have no weight decay, as in fourfold."""

Step = Callable[[Tensor], float]
"""A training step on the global batch of tokens; the loss of this rank's rows."""


def fsdp(model: GPT) -> Step:
    """FSDP2, block by block."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trained(model, model, rows=True)


def ddp(model: GPT) -> Step:
    """Replicas."""
    return _trained(model, nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), rows=True)


def tensor(model: GPT) -> Step:
    """DTensor's column and row plan (`parallelize_module`), the vocabulary cut, the loss on cut logits.

    Local tensors between the linears, so that only these and the loss pay for DTensor. With gathered logits and a plain
    loss instead, a step of the large model took 3 % more CPU, one of the tiny model 6 % less.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for number, block in enumerate(model.blocks):
        _deal_packed(block.get_submodule("attention.qkv"), mesh.size())
        plan |= {f"blocks.{number}.{name}": ColwiseParallel() for name in ("attention.qkv", "mlp.expand")}
        plan |= {f"blocks.{number}.{name}": RowwiseParallel() for name in ("attention.project", "mlp.contract")}
    parallelize_module(model, mesh, plan)
    return _trained(model, model, rows=False)


@torch.no_grad()
def _deal_packed(qkv: nn.Module, ranks: int) -> None:
    """q, k and v of the first rank's heads first, then those of the second's: its rows are cut into equal parts."""
    for parameter in qkv.parameters():
        parts = parameter.view(3, ranks, -1, *parameter.shape[1:])
        parameter.copy_(parts.transpose(0, 1).reshape(parameter.shape))


def _trained(model: GPT, called: nn.Module, *, rows: bool) -> Step:
    """A step with fused AdamW.

    Args:
        model: holds the parameters.
        called: by the loss.
        rows: every rank has its share of them; else all have all, and logits lie over the ranks by vocabulary.
    """
    optimizer = torch.optim.AdamW(list(_groups(model)), lr=RATE, fused=True)
    scope = nullcontext if rows else loss_parallel

    def step(tokens: Tensor) -> float:
        mine = tokens.chunk(dist.get_world_size())[dist.get_rank()] if rows else tokens
        with scope():
            total, count = cross_entropy(called, {"tokens": mine})
            loss = total / count
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = loss.detach()
        return float(found.full_tensor() if isinstance(found, DTensor) else found)

    return step


def _groups(model: GPT) -> Iterator[dict[str, Any]]:
    """A fused update takes either DTensors or plain tensors."""
    for decayed in (True, False):
        for cut in (True, False):
            some = [one for one in model.parameters() if (one.ndim > 1, isinstance(one, DTensor)) == (decayed, cut)]
            if some:
                yield {"params": some, "weight_decay": DECAY if decayed else 0.0}
