"""Batch norm whose statistics are those of the whole micro-batch, on however many ranks its rows lie.

The scope has a name: *the micro-batch, over all ranks*. One process that takes the same micro-batches takes the same
statistics (Ioffe and Szegedy, "Batch Normalization", ICML 2015), and so the ranks compute what it computes, running
statistics included.

Every rank takes the mean and the squared deviations of its own rows, tells them with its count to the others in one
message a layer, and joins all of them in rank order (Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances", 1979): nothing is subtracted that is much larger than the result, however far
the mean lies from zero. Backward sums the two statistics of the gradient, again one message a layer. Statistics cross
in float64 whatever the model computes in: they are few.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

import fourfold.wire.ops  # noqa: F401 (registers fourfold::sum_identity)
from fourfold.anatomy import BATCH_NORMS
from fourfold.placement.uncopied import Uncopied
from fourfold.wire import Axis
from fourfold.wire.axis import axis_of


class BatchNormError(ValueError):
    """Statistics of a single value."""


class Scope:
    """Whose statistics the batch norms of one placed model take.

    Attributes:
        axis: the ranks that the rows of a micro-batch lie on.
        again: whether what runs now is a block's second forward, in backward; running statistics move in the first.
        counts: this rank's rows belong to the micro-batch. A rank without rows computes one that does not. Set for
            each micro-batch before its forward; its backward must be over before the next one's forward begins.
    """

    def __init__(self, axis: Axis, again: Callable[[], bool]) -> None:
        self.axis, self.again = axis, again
        self.counts = True


class BatchNorm(Uncopied):
    """Takes over one module's forward: what it asks of `F.batch_norm`, it gets over all ranks.

    The module's own code runs, a subclass's too: it keeps its checks, its momentum and its count of batches.
    """

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        self.module, self.scope = module, scope
        self.inner: Callable[..., Tensor] = module.forward
        if type(module).forward is nn.SyncBatchNorm.forward:  # its own synchronisation knows neither CPUs nor our axes
            self.inner = partial(nn.BatchNorm2d.forward, module)  # type: ignore[arg-type]
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the model calls."""
        with _Replaced(self.scope, self.module):
            return self.inner(*args, **kwargs)


def synchronise(model: nn.Module, scope: Callable[[], Scope]) -> Scope | None:
    """Take over every batch norm of the model.

    Args:
        scope: makes what they share; asked for only if there is one.

    Returns:
        The scope; None for a model without batch norm.
    """
    norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
    if not norms:
        return None
    shared = scope()
    for module in norms:
        BatchNorm(module, shared)
    return shared


def takes_statistics(module: nn.Module) -> bool:
    """Whether the module, as it stands, takes statistics of its batch (in training, or if it keeps no running ones)."""
    return module.training or getattr(module, "running_mean", None) is None


def moved_once(module: nn.Module) -> set[int]:
    """The ids of the buffers inside `module` that change in a block's first forward only, though in place."""
    taken = (inner for inner in module.modules() if isinstance(getattr(inner.forward, "__self__", None), BatchNorm))
    return {id(buffer) for inner in taken for buffer in inner.buffers()}


class _Replaced(TorchFunctionMode):
    """`F.batch_norm` with the statistics of all ranks; in a second forward, buffers are left alone."""

    def __init__(self, scope: Scope, module: nn.Module) -> None:
        super().__init__()
        self.scope, self.again = scope, scope.again()
        self.counter = getattr(module, "num_batches_tracked", None)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.batch_norm:
            return self._normalised(*args, **(kwargs or {}))
        if func is torch.batch_norm:
            input, weight, bias, running_mean, running_var, *settings, _ = args
            return self._normalised(input, running_mean, running_var, weight, bias, *settings)
        if self.again and func is Tensor.add_ and args[0] is self.counter:
            return self.counter
        return func(*args, **(kwargs or {}))

    def _normalised(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """`F.batch_norm`."""
        if not training:
            if running_mean is not None and input.itemsize < 4:  # torch wants the weights in the statistics' type
                weight, bias = (None if one is None else one.to(running_mean.dtype) for one in (weight, bias))
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        scope = self.scope
        result, mean, variance, shares = _Normalise.apply(input, weight, bias, eps, scope.axis.key, scope.counts)
        if running_mean is not None and running_var is not None and not self.again:
            with torch.no_grad():
                unbiased = variance * shares[1].to(variance.dtype)
                running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
                running_var.mul_(1 - momentum).add_(unbiased, alpha=momentum)
        return result


class _Normalise(torch.autograd.Function):
    """y = (x − mean) / √(variance + ε) · weight + bias. A function of ops, so that compiled graphs do not break at it.

    torch's own kernels do the work of all elements: the forward of evaluation, with these statistics for running ones.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axis: str, counts: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, shares = torch.ops.fourfold.moments(x, axis, counts)
        scale, shift = (None if values is None else values.to(mean.dtype) for values in (weight, bias))
        result = F.batch_norm(x, mean, variance, scale, shift, False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, variance, shares)
        ctx.eps, ctx.axis = eps, axis
        ctx.mark_non_differentiable(mean, variance, shares)
        return result, mean, variance, shares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """With g the gradient and x̂ the normalised input: weight/σ · (g − Σg/N − x̂ · Σ(g·x̂)/N), sums over all ranks.

        The gradients of weight and bias stay those of this rank's rows: they are summed like every other.
        """
        gradient = grad_outputs[0]
        x, weight, mean, variance, shares = ctx.saved_tensors
        _, along, plain = torch.ops.aten.native_batch_norm_backward(
            gradient, x, None, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        result = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([plain, along]).double()
            sums = torch.ops.fourfold.sum_identity(sums, ctx.axis, "activation-gradient")
            of_plain, of_along = (sums * -shares[0]).to(mean.dtype).chunk(2)
            scale = torch.rsqrt(variance + ctx.eps)
            scale = scale if weight is None else scale * weight
            result = F.batch_norm(x, mean, variance, of_along, of_plain, False, 0.0, ctx.eps)
            result = result.add_(gradient).mul_(_by_channel(scale, x))
        _, of_weight, of_bias, *_ = ctx.needs_input_grad
        return result, along if of_weight else None, plain if of_bias else None, None, None, None


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """[channels] → [channels, 1, …], to be broadcast over (rows, channels, …)."""
    return values.view(-1, *(1,) * (x.dim() - 2))


# ---- the statistics, as a registered op: one message, counted each time it runs


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def message(channels: int) -> int:
    """Numbers that a rank tells of a layer in forward: mean and squared deviations a channel, and its count."""
    return 2 * channels + 1


def _moments(x: Tensor, axis: str, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance [channels] of all ranks' x; (1/N where this rank counts, else 0; N/(N−1)), float64."""
    group, channels = axis_of(axis), x.shape[1]
    count = x.numel() // channels if counts else 0
    mine = torch.zeros(message(channels), dtype=torch.float64, device=x.device)
    if count:
        mean, variance = torch.batch_norm_update_stats(x.detach().to(_wide(x)), None, None, 0.0)
        mine[:channels], mine[channels:-1], mine[-1] = mean, variance.double() * count, count
    every = mine.new_empty(group.size, len(mine))
    group.all_gather(every, mine, "activation").wait()
    means, deviations, numbers = every[:, :channels], every[:, channels:-1], every[:, -1:]
    total = numbers.sum()
    if count <= 1 and total <= 1:  # whoever has two values knows; so nobody else asks the device
        raise BatchNormError(
            f"batch norm over {channels} channels: expected more than one value a channel in a micro-batch, found "
            f"{int(total)}; use fewer or larger micro-batches"
        )
    mean = (means * (numbers / total)).sum(0)
    variance = (deviations + numbers * (means - mean).square()).sum(0) / total
    shares = torch.stack([(1 if counts else 0) / total, total / (total - 1)])
    return mean.to(_wide(x)), variance.to(_wide(x)), shares


def _fake_moments(x: Tensor, axis: str, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(x.shape[1], dtype=_wide(x))
    return mean, torch.empty_like(mean), x.new_empty(2, dtype=torch.float64)


_library = torch.library.Library("fourfold", "FRAGMENT")
_library.define("moments(Tensor x, str axis, bool counts) -> (Tensor, Tensor, Tensor)")
_library.impl("moments", _moments, "CompositeExplicitAutograd")
torch.library.register_fake("fourfold::moments", _fake_moments, lib=_library)
