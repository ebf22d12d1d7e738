"""A block of the model with the life of its weights around its forward.

`module.forward` is replaced on the instance, so names, classes and hooks of the model stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold import randomness
from fourfold.placement.departures import Departures
from fourfold.placement.selective import recompute_attention
from fourfold.placement.unit import Unit


@dataclass(frozen=True)
class Neighbours:
    """The units gathered ahead of time: the next one in forward, the one before in backward."""

    before: Unit | None
    after: Unit | None


class Block:
    """Wraps one block's forward: gather, compute, free; in backward gather again, and free when backward leaves.

    Recompute wraps the gathering, not the other way round: what is computed again gathers its weights again.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        unit: Unit,
        departures: Departures,
        *,
        recompute: str,
        random: bool,
        first: bool,
        last: bool,
    ):
        """Take over `module.forward`.

        Args:
            path: of the module in the model; the prefix of its random sites.
            module: the block.
            unit: its weights.
            departures: told when backward has left the block.
            recompute: "none", "selective" or "full".
            random: the block draws random numbers.
            first: the first block of its unit in execution order: when backward leaves it, it leaves the unit.
            last: the last block of its unit: after its forward the unit's weights can go.
        """
        self.path, self.module, self.unit, self.departures = path, module, unit, departures
        self.recompute, self.random, self.first, self.last = recompute, random, first, last
        self.neighbours = Neighbours(None, None)
        self.keep = False
        """The weights stay after forward: backward begins with this block."""
        self.inner: Callable[..., Any] = module.forward
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model calls."""
        if not torch.is_grad_enabled():
            return self._compute(randomness.current(), args, kwargs)
        if self.unit.arena.transient:
            args, kwargs = self._mark(args, kwargs)
        compute = partial(self._compute, randomness.current())
        if self.recompute == "full":
            result = checkpoint(compute, args, kwargs, use_reentrant=False, preserve_rng_state=False)
        else:
            result = compute(args, kwargs)
        if self.unit.arena.transient:
            for tensor in tensors(result):
                if tensor.requires_grad:
                    tensor.register_hook(self._enter_backward)
        return result

    def _compute(self, position: randomness.Position | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.unit.ready()
        backward = self.departures.active
        if not backward and self.neighbours.after is not None:
            self.neighbours.after.start()
        with self._streams(position):
            result = self.inner(*args, **kwargs)
        if self.last and not backward and not (self.keep and torch.is_grad_enabled()):
            self.unit.free()
        return result

    @contextmanager
    def _streams(self, position: randomness.Position | None) -> Iterator[None]:
        """The random streams of this block, entered inside its forward so that recomputation draws the same."""
        with ExitStack() as stack:
            if self.random and position is not None:
                stack.enter_context(randomness.at(position))
                stack.enter_context(randomness.inside(self.module, self.path))
            if self.recompute == "selective":
                stack.enter_context(recompute_attention())
            yield

    def _enter_backward(self, gradient: Tensor) -> Tensor:
        self.unit.ready()
        if self.neighbours.before is not None:
            self.neighbours.before.start()
        return gradient

    def _mark(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the inputs through an edge that tells when backward leaves the block."""
        inputs = [tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad]
        if not self.first or not inputs:
            return args, kwargs
        self.departures.expect_edge(self.unit)
        marked = _Edge.apply(partial(self.departures.left, self.unit), *inputs)
        replaced = dict(zip(map(id, inputs), marked, strict=True))
        return _replace((args, kwargs), replaced)


class _Edge(torch.autograd.Function):
    """Identity whose backward runs after everything between it and the loss."""

    @staticmethod
    def forward(ctx: Any, left: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.left = left
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.left()
        return (None, *gradients)


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings (a model output is a mapping)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors(entry)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors(entry)


def _replace(value: Any, replaced: Mapping[int, Tensor]) -> Any:
    """The same structure with some tensors exchanged; only plain containers are rebuilt."""
    if isinstance(value, Tensor):
        return replaced.get(id(value), value)
    if type(value) is dict:
        return {key: _replace(entry, replaced) for key, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_replace(entry, replaced) for entry in value)
    return value
