"""A twin of a model on which a forward costs little: same structure and ties, other tensors.

Three kinds are tried in turn: tensors on meta (shapes only, no memory), fake tensors (they remember that they
stand for a CPU), real ones on CPU. Meta fails where the code's path hangs on values; the last always runs, at its cost.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourfold import torch_private
from fourfold.anatomy.stock import OneSequenceARow


class Twin(NamedTuple):
    """A model and a batch to run once, inside `mode`; `kind` is "meta", "fake" or "real"."""

    kind: str
    model: nn.Module
    batch: Mapping[str, Tensor]
    mode: AbstractContextManager


def twins(model: nn.Module, batch: Mapping[str, Tensor], real: Callable[[nn.Module], nn.Module]) -> Iterator[Twin]:
    """The three twins, cheapest first; the model itself is not changed.

    Each is in training mode, its parts in the modes that they have in the model if that is in training: what a user
    has frozen by `eval()` stays so.

    Args:
        model: any module, on any device.
        batch: its example batch.
        real: makes real CPU weights for a model that has meta parameters.
    """

    def on_meta(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="meta")

    def training(twin: nn.Module) -> nn.Module:
        return twin if model.training else twin.train()

    on_meta_batch = {name: on_meta(tensor) for name, tensor in batch.items()}
    yield Twin("meta", training(twin(model, on_meta, on_meta)), on_meta_batch, OneSequenceARow())

    fakes = torch_private.fake_mode()

    def fake(tensor: Tensor) -> Tensor:
        return torch_private.fake_cpu(fakes, tensor)

    yield Twin("fake", training(twin(model, fake, fake)), {name: fake(t) for name, t in batch.items()}, fakes)

    source = real(model) if any(p.is_meta for p in model.parameters()) else model
    # Weights are only read, hence shared; buffers (running statistics) are written, hence copied.
    yield Twin("real", training(twin(source, lambda t: t, Tensor.clone)), dict(batch), nullcontext())


def twin(model: nn.Module, weight: Callable[[Tensor], Tensor], buffer: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deep copy whose tensors are `weight(parameter)` and `buffer(buffer or loose tensor)`; ties stay ties."""
    memo: dict[int, object] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(weight(parameter).detach(), requires_grad=parameter.requires_grad)
        for tensor in (*model.buffers(), *(loose for _, loose in loose_tensors(model))):
            if id(tensor) not in memo:
                memo[id(tensor)] = buffer(tensor)
        return copy.deepcopy(model, memo)


def loose_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules hold as plain attributes, neither parameters nor buffers, by path."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield (f"{path}.{name}" if path else name), value
