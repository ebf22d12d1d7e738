"""Cross-entropy of logits that lie over an axis by vocabulary: the logits stay, a few numbers a token cross.

−log p(t) = log Σ exp x − x_t. Every rank takes the logarithm of the sum over its own part of the vocabulary, and the
target's logit if it has it; label smoothing adds the sum of the logits. These statistics are joined over the axis in
rank order, each token by one rank, which tells the others: the traffic of summing k numbers a token (k = 2; 3 with
smoothing) and a third less than the maximum, the sum of exponentials and the target's logit summed one by one, as
Shoeybi et al. do it ("Megatron-LM", 2019, section 3). Backward needs nobody: softmax is exp(x − log Σ exp x).

Statistics are float32 for logits of 16 and 32 bits, else float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fourfold.wire import Axis, formulas
from fourfold.wire.axis import axis_of

CACHED = 1 << 17
"""Logits whose exponentials are taken together on CPU: of 128 KiB to 4 MiB, 512 KiB took the least time."""


class VocabularyError(ValueError):
    """Logits, targets and parts of the vocabulary that do not go together."""


def vocabulary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of logits whose last dim lies over the axis, without gathering them.

    Args:
        logits: [..., V_local], this rank's part of the vocabulary: that of rank 0 first, then that of rank 1, ….
        targets: [...] int64, numbers of the whole vocabulary; the same on every rank of the axis.
        axis: the ranks that the vocabulary lies on.
        sizes: V_local of every rank; None: equal.
        ignore_index, reduction, label_smoothing: of `F.cross_entropy`.

    Returns:
        What one process has, on every rank: a scalar ("mean", "sum") or [...] ("none"), in the logits' dtype.

    Raises:
        VocabularyError: shapes, sizes or a reduction that cannot be; on CPU also a target outside of the vocabulary
            (elsewhere, where looking would wait for the device, its loss is NaN).
    """
    sizes = _checked(logits, targets, axis, sizes, reduction)
    kept = targets != ignore_index
    statistics = _statistics(logits, targets.where(kept, 0), axis, sizes, totals=label_smoothing != 0.0)
    whole, picked, *totals = statistics.unbind(-1)
    losses = whole - picked
    if totals:
        losses = (1 - label_smoothing) * losses + label_smoothing * (whole - totals[0] / sum(sizes))
    losses = losses.where(kept, 0)
    if reduction == "none":
        return losses.to(logits.dtype)
    total = losses.sum()
    return (total / kept.sum() if reduction == "mean" else total).to(logits.dtype)


def vocabulary_logsumexp(logits: Tensor, axis: Axis, *, sizes: Sequence[int] | None = None) -> Tensor:
    """log Σ exp over the vocabulary, [..., V_local] → [...], as in penalties of large logits ("z-loss")."""
    targets = logits.new_zeros(logits.shape[:-1], dtype=torch.int64)
    sizes = _checked(logits, targets, axis, sizes, "none")
    return _statistics(logits, targets, axis, sizes, totals=False)[..., 0].to(logits.dtype)


def sent(tokens: int, size: int, index: int, dtype: torch.dtype, *, smoothing: bool = False) -> int:
    """Bytes that rank `index` of `size` hands over in forward, of kind activation; backward sends nothing.

    An all-reduce of `statistics` numbers a token whose parts are whole tokens: 2 (size − 1)/size · tokens · numbers ·
    bytes, where the tokens divide.
    """
    bytes_each = (3 if smoothing else 2) * _wide(dtype).itemsize
    return formulas.all_reduce_of_parts([count * bytes_each for count in formulas.shares(tokens, size)], index)


def _checked(logits: Tensor, targets: Tensor, axis: Axis, sizes: Sequence[int] | None, reduction: str) -> Sequence[int]:
    if logits.dim() == 0 or targets.shape != logits.shape[:-1]:
        raise VocabularyError(
            f"cross-entropy over axis {axis.name}: expected targets of the shape of the logits "
            f"{tuple(logits.shape)} without their last dim, found {tuple(targets.shape)}; flatten both alike"
        )
    if reduction not in ("none", "mean", "sum"):
        raise VocabularyError(f"cross-entropy: expected reduction none, mean or sum, found {reduction!r}")
    sizes = [logits.shape[-1]] * axis.size if sizes is None else sizes
    if len(sizes) != axis.size or sizes[axis.index] != logits.shape[-1]:
        raise VocabularyError(
            f"cross-entropy over axis {axis.name}: expected `sizes` of {axis.size} parts, {logits.shape[-1]} of them "
            f"on rank {axis.index}, found {list(sizes)}"
        )
    return sizes


def _statistics(logits: Tensor, targets: Tensor, axis: Axis, sizes: Sequence[int], *, totals: bool) -> Tensor:
    """[..., k]: log Σ exp, the target's logit, and if asked for the sum of all logits, of the whole vocabulary."""
    tokens = logits.flatten(0, -2) if logits.dim() > 1 else logits.unsqueeze(0)
    found = torch.ops.fourfold.vocabulary(tokens, targets.reshape(-1).long(), axis.key, sizes, totals)
    return found.view(*targets.shape, found.shape[-1])


# ---- the op: one exchange, counted each time it runs


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _vocabulary(logits: Tensor, targets: Tensor, axis: str, sizes: Sequence[int], totals: bool) -> Tensor:
    """[tokens, k] of the whole vocabulary, from logits [tokens, V_local] and targets [tokens]."""
    group = axis_of(axis)
    if targets.device.type == "cpu" and not group.dry:
        _known(targets, sum(sizes), group)
        return _gathered(logits, targets, group, sizes, totals)
    return _told(_gathered(logits, targets, group, sizes, totals), targets, sum(sizes))


def _gathered(logits: Tensor, targets: Tensor, group: Axis, sizes: Sequence[int], totals: bool) -> Tensor:
    wide = logits.to(_wide(logits.dtype))
    places, here = _places(targets, group, sizes)
    picked = wide.gather(1, places).where(here, 0) if wide.shape[1] else wide.new_zeros(len(wide), 1)
    mine = [_logsumexp(wide), picked, *([wide.sum(1, keepdim=True)] if totals else [])]
    return _joined(torch.cat(mine, 1), group)


def _logsumexp(logits: Tensor) -> Tensor:
    """[tokens, 1]; on CPU a single operator, whatever it is made of, for those who watch: forecasts."""
    return torch.ops.fourfold.logsumexp(logits) if logits.device.type == "cpu" else logits.logsumexp(1, keepdim=True)


def _by_parts(logits: Tensor) -> Tensor:
    """[tokens, 1]; some tokens at a time, whose exponentials stay in the cache instead of filling new memory."""
    together = max(1, CACHED // max(1, logits.shape[1]))
    result = logits.new_empty(len(logits), 1)
    for some, place in zip(logits.split(together), result.split(together), strict=True):
        torch.logsumexp(some, 1, keepdim=True, out=place)
    return result


def _joined(mine: Tensor, group: Axis) -> Tensor:
    """Every rank's statistics [tokens, k] as one, on every rank: each joins its share of the tokens and tells it."""
    tokens, k = mine.shape
    counts = [count * k for count in formulas.shares(tokens, group.size)]
    own = counts[group.index]
    parts = mine.new_empty(group.size, own // k, k)
    group.all_to_all(parts, mine, "activation", [own] * group.size, counts).wait()
    share = parts.sum(0)
    share[:, 0] = parts[..., 0].logsumexp(0)
    joined = torch.empty_like(mine)
    group.all_gather(joined, share, "activation", sizes=counts).wait()
    return joined


def _places(targets: Tensor, group: Axis, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Where the targets lie in this rank's part, clamped into it, and which of them do: both [tokens, 1]."""
    places = targets.unsqueeze(1) - sum(sizes[: group.index])
    inside = places.clamp(0, max(sizes[group.index] - 1, 0))
    return inside, (places == inside) & (sizes[group.index] > 0)


def _known(targets: Tensor, size: int, group: Axis) -> None:
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < size:
        raise VocabularyError(
            f"cross-entropy over axis {group.name}: expected targets from 0 to {size - 1}, found "
            f"{int(targets.min())} … {int(targets.max())}; give `ignore_index` what is not to count"
        )


def _told(statistics: Tensor, targets: Tensor, size: int) -> Tensor:
    """Where nobody waits for the device, a target outside of the vocabulary has the logit NaN."""
    statistics[:, 1].masked_fill_((targets < 0) | (targets >= size), torch.nan)
    return statistics


def _shape(logits: Tensor, targets: Tensor, axis: str, sizes: Sequence[int], totals: bool) -> Tensor:
    """On meta and fake tensors; a dry axis counts what would cross, unless it is a compiler that looks."""
    if axis_of(axis).dry and not torch.compiler.is_compiling():
        return _gathered(logits, targets, axis_of(axis), sizes, totals)
    return logits.new_empty(len(logits), 3 if totals else 2, dtype=_wide(logits.dtype))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, targets, ctx.axis, ctx.sizes, _ = inputs
    ctx.save_for_backward(logits, targets, output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    logits, targets, statistics = ctx.saved_tensors
    result = _Gradient.apply(gradient, logits, targets, statistics, ctx.axis, ctx.sizes)
    return result, None, None, None, None


class _Gradient(torch.autograd.Function):
    """softmax · g₀ + one-hot(target) · g₁ + g₂, of this rank's part; the ranks' g are equal.

    A function, so that a second derivative is refused: torch's `once_differentiable` lets one pass as zero where g
    needs no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        logits: Tensor,
        targets: Tensor,
        statistics: Tensor,
        axis: str,
        sizes: Sequence[int],
    ) -> Tensor:
        result = (logits - statistics[:, :1]).exp_().mul_(gradient[:, :1])
        if logits.shape[1]:
            places, here = _places(targets, axis_of(axis), sizes)
            result.scatter_add_(1, places, gradient[:, 1:2].where(here, 0))
        if gradient.shape[1] > 2:
            result += gradient[:, 2:]
        return result.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> NoReturn:
        raise VocabularyError(
            "cross-entropy over a cut vocabulary has first derivatives only, found a derivative of its gradient; "
            "gather the logits for a loss that needs one"
        )


_library = torch.library.Library("fourfold", "FRAGMENT")
_library.define("logsumexp(Tensor logits) -> Tensor")
_library.impl("logsumexp", _by_parts, "CompositeExplicitAutograd")
torch.library.register_fake("fourfold::logsumexp", lambda logits: logits.new_empty(len(logits), 1), lib=_library)
_library.define("vocabulary(Tensor logits, Tensor targets, str axis, int[] sizes, bool totals) -> Tensor")
_library.impl("vocabulary", _vocabulary, "CompositeExplicitAutograd")
torch.library.register_fake("fourfold::vocabulary", _shape, lib=_library)
torch.library.register_autograd("fourfold::vocabulary", _backward, setup_context=_remember, lib=_library)
