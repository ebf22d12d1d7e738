"""A block of the model with the life of its weights around its forward.

`module.forward` is replaced on the instance, so names, classes and hooks of the model stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fourfold import randomness
from fourfold.anatomy.nest import tensors
from fourfold.placement.batch_norm import moved_once
from fourfold.placement.departures import Departures
from fourfold.placement.selective import recompute_attention
from fourfold.placement.uncopied import Uncopied
from fourfold.placement.unit import Unit


class RecomputeError(ValueError):
    """A block that cannot be computed twice."""


@dataclass(frozen=True)
class Neighbours:
    """The units gathered ahead of time: the next one in forward, the one before in backward."""

    before: Unit | None
    after: Unit | None


class Block(Uncopied):
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
        torchs: bool,
        first: bool,
        last: bool,
    ):
        """Take over `module.forward`, unless there is nothing to do around it.

        Args:
            path: of the module in the model; the prefix of its random sites.
            module: the block.
            unit: its weights.
            departures: told when backward has left the block.
            recompute: "none", "selective" or "full".
            random: dropouts of the model draw from logical streams.
            torchs: the model draws from torch's own generators, too; recomputation repeats these numbers.
            first: the first block of its unit in execution order: when backward leaves it, it leaves the unit.
            last: the last block of its unit: after its forward the unit's weights can go.
        """
        self.path, self.module, self.unit, self.departures = path, module, unit, departures
        self.recompute, self.random, self.torchs, self.first, self.last = recompute, random, torchs, first, last
        self.neighbours = Neighbours(None, None)
        self.keep = False
        """The weights stay after forward: backward begins with this block."""
        self.moved_once = moved_once(module) if recompute == "full" else set()
        self.inner: Callable[..., Any] = module.forward
        # Full recomputation keeps nothing of the block: it computes it again, and `_compute` brings the weights in.
        watches = unit.arena.transient and recompute != "full"
        self._saving = saved_tensors_hooks(_kept, self._wanted) if watches else nullcontext()
        rests = unit.arena.rest is unit.arena.shard and not unit.arena.transient
        self.idle = rests and not random and recompute == "none"
        """Whole weights are always here, and nothing is drawn or recomputed: the model's own forward is called."""
        if not self.idle:
            module.forward = self.forward

    def compile(self, **settings: Any) -> None:
        """Compile the block's own forward."""
        self.inner = torch.compile(self.inner, **settings)
        if self.idle:
            self.module.forward = self.inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model calls."""
        if not torch.is_grad_enabled():
            return self._compute(randomness.current(), args, kwargs)
        if self.unit.arena.transient:
            self._watch_inputs(args, kwargs)
        if self.recompute == "full":
            result = self._recomputed(args, kwargs)
        else:
            result = self._compute(randomness.current(), args, kwargs)
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
        with self._saving, self._streams(position):
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
        self._awake()
        return gradient

    def _awake(self) -> None:
        self.unit.ready()
        if self.neighbours.before is not None:
            self.neighbours.before.start()

    def _wanted(self, kept: tuple[Tensor, int]) -> Tensor:
        """What the block's forward kept for backward, which may come here by another way than the block's result."""
        tensor, version = kept
        if self.unit.hidden:
            self._awake()
        if tensor._version != version:
            # Torch checks this itself only where nobody watches what is kept.
            raise RuntimeError(
                f"{self.path}: a tensor [{tensor.dtype} {list(tensor.shape)}] that backward needs has been modified by "
                f"an inplace operation: it is at version {tensor._version}; expected version {version}"
            )
        return tensor

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ask to be told when backward leaves the block: when it has the gradients of all of the block's inputs."""
        inputs = [tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad]
        if self.first and inputs:
            self.departures.expect_edge(self.unit)
            register_multi_grad_hook(inputs, lambda gradients: self.departures.left(self.unit), mode="all")

    def _recomputed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward, run again in backward: what it changes in place would be changed twice."""
        buffers = (buffer for buffer in self.module.buffers() if id(buffer) not in self.moved_once)
        held = [*tensors((args, kwargs)), *buffers]
        before = [tensor._version for tensor in held]
        compute = partial(self._compute, randomness.current())
        # Torch stops computing again at the last tensor that backward wants, which for `F.rrelu` is its noise, not yet
        # drawn: where random numbers are torch's own, everything is computed.
        result = checkpoint(
            compute, args, kwargs, use_reentrant=False, preserve_rng_state=self.torchs, early_stop=not self.torchs
        )
        if any(tensor._version != version for tensor, version in zip(held, before, strict=True)):
            raise RecomputeError(
                f"{self.path}: its forward changes an input or a buffer in place, and plan.placement.recompute: full "
                "would do that twice; use recompute: none or selective, or change the block"
            )
        return result


def _kept(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version
