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
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from fourfold.models.gpt import GPT
from fourfold.training.losses.cross_entropy import cross_entropy, summed

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


def pipeline(kind: Any, microbatches: int, cut: tuple[int, ...]) -> Callable[[GPT], Step]:
    """torch's own pipelining: a schedule class, on stages of so many blocks; embeddings go first and the head last."""

    def peer(model: GPT) -> Step:
        size, index = dist.get_world_size(), dist.get_rank()
        numbers = range(index, len(cut), size)
        parts = [_Part(model, sum(cut[:number]), sum(cut[: number + 1])) for number in numbers]
        device = torch.device("cpu")
        stages = [PipelineStage(part, at, len(cut), device) for part, at in zip(parts, numbers, strict=True)]
        groups = [group for part in parts for group in _groups(part)]
        optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
        counts: list[int] = []

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            return summed(logits, targets)[0] / counts[-1]

        given = stages if len(stages) > 1 else stages[0]
        runner = kind(given, microbatches, loss_fn=loss_of, scale_grads=False)

        def step(tokens: Tensor) -> float:
            inputs, targets, losses = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), []
            counts.append(targets.numel())
            ends = index == (len(cut) - 1) % size
            about: dict[str, Any] = {"target": targets, "losses": losses} if ends else {}
            runner.step(*([inputs] if index == 0 else []), return_outputs=False, **about)
            optimizer.step()
            optimizer.zero_grad()
            return float(sum(losses)) * size if ends else 0.0  # the ranks' losses are added up when they are compared

        return step

    return peer


class _Part(nn.Module):
    """Some blocks of a GPT, with what lies before the first and after the last."""

    def __init__(self, model: GPT, first: int, last: int) -> None:
        super().__init__()
        self.blocks = model.blocks[first:last]
        self.begins, self.ends = first == 0, last == len(model.blocks)
        if self.begins:
            self.tokens, self.positions = model.tokens, model.positions
        if self.ends:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.begins:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.ends else x


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


def _groups(model: nn.Module) -> Iterator[dict[str, Any]]:
    """A fused update takes either DTensors or plain tensors."""
    for decayed in (True, False):
        for cut in (True, False):
            some = [one for one in model.parameters() if (one.ndim > 1, isinstance(one, DTensor)) == (decayed, cut)]
            if some:
                yield {"params": some, "weight_decay": DECAY if decayed else 0.0}
