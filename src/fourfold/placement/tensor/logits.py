"""Logits that lie over an axis, as a user's loss sees them: whole.

A placed model on a tensor grid returns logits of which this rank holds a part of the vocabulary. Losses are anybody's
code, written for whole logits. `SplitLogits` is a function mode around that code. The tensors that the executor marks
stay plain tensors of the local part, so autograd, hooks and saved tensors know nothing of them; but every function of
torch that gets one passes through the mode, properties such as `.shape` too, and

- shapes and sizes answer for the whole tensor (`logits.view(-1, logits.size(-1))` is what people write), which is why
  this is a mode and not a subclass of Tensor: a subclass would follow the tensor into the model's backward;
- views, slices of other dims, casts and copies give a marked part again;
- `F.cross_entropy`, and `F.nll_loss` of `log_softmax`, are computed from the parts: only statistics cross;
- everything else gets the whole tensor, gathered at its first such use, once a tensor.

So any loss is exact, and the usual ones are cheap. All ranks of the axis must run the same functions in the same order,
as ranks that hold the same rows do: a loss that prints logits on one rank alone waits for the others. The mode is gone
when backward runs, so a loss that would recompute its own use of logits there (`torch.utils.checkpoint`) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.vocabulary import VocabularyError, vocabulary_cross_entropy, vocabulary_logsumexp
from fourfold.torch_private import inside_checkpoint, map_leaves, storage_key
from fourfold.wire import Axis, ops


@dataclass
class Mark:
    """What is known of a tensor of which this rank holds a part.

    Attributes:
        axis: the ranks that the parts lie on.
        sizes: of the parts along the cut dim, in rank order.
        dim: that is cut, from the front.
        log: the tensor stands for the logarithm of its softmax, which is taken when it is gathered.
        whole, version: the gathered tensor, once something has asked for it, and the version it had.
        pinned: the gathered tensor was written to or is watched: it is what the name means from here on.
    """

    axis: Axis
    sizes: tuple[int, ...]
    dim: int
    log: bool = False
    whole: Tensor | None = None
    version: int = 0
    pinned: bool = False

    def shape(self, part: Tensor) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size((*part.shape[: self.dim], sum(self.sizes), *part.shape[self.dim + 1 :]))

    def stand_in(self, part: Tensor) -> Tensor:
        """A tensor of the whole's shape and type, without memory."""
        return torch.empty(self.shape(part), dtype=part.dtype, device="meta")


class SplitLogits(TorchFunctionMode):
    """The mode; enter it around the loss, and `paused` around the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self._marks = WeakTensorKeyDictionary()
        self._paused = 0

    def mark(self, tensor: Tensor, axis: Axis, sizes: Sequence[int] | None = None) -> None:
        """The last dim of `tensor` is this rank's part of a dim that lies over the axis.

        Args:
            tensor: [..., n], what the model returns.
            axis: of the parts; on one of size 1 the tensor is whole, and stays as it is.
            sizes: of every rank's part, in rank order, in which the parts make up the whole; None: equal.

        Raises:
            VocabularyError: sizes that are not those of the axis and of this part.
        """
        found = tuple(sizes or [tensor.shape[-1]] * axis.size)
        if len(found) != axis.size or found[axis.index] != tensor.shape[-1]:
            raise VocabularyError(
                f"split logits over axis {axis.name}: expected {axis.size} sizes, {tensor.shape[-1]} on rank "
                f"{axis.index}, as in the tensor of shape {tuple(tensor.shape)}; found {list(found)}"
            )
        if axis.size > 1:
            self._marks[tensor] = Mark(axis, found, tensor.dim() - 1)

    @property
    def quiet(self) -> bool:
        """Inside of `paused`."""
        return self._paused > 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is seen inside: for the model's own forward, to which its tensors are what they are.

        Even so every function of torch takes a way around by Python; a mode that is entered when the model has returned
        costs its forward nothing.
        """
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def refuse_changed(self, given: Any) -> None:
        """What a module of the model is given is a part, on which nothing is known of what was done to the whole.

        Raises:
            VocabularyError: a tensor that was changed or is watched.
        """
        for part in _tensors(given):
            mark = self._marks.get(part)
            if mark is not None and mark.whole is not None and (mark.pinned or mark.whole._version != mark.version):
                raise VocabularyError(
                    f"loss: a tensor of shape {list(mark.shape(part))} was changed in place or is watched, and is then "
                    f"given to a module of the model, which knows the part of it on axis {mark.axis.name}; change a "
                    "copy, or leave out plan.placement.tensor"
                )

    def gathered(self, part: Tensor) -> Tensor:
        """The whole tensor of a marked part; gathered at the first call, the same later. Backward cuts, sends nothing.

        Gradients are recorded whatever the caller's mode: a metric without gradients may come before the loss.
        """
        mark = self._marks[part]
        if mark.whole is None:
            with torch.enable_grad():
                whole = ops.gather_cut(part, mark.axis, "activation", mark.dim, mark.sizes)
                mark.whole = F.log_softmax(whole, mark.dim) if mark.log else whole
            mark.version = mark.whole._version
        return mark.whole

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or not self._marks:
            return func(*args, **kwargs)
        marked = [tensor for tensor in _tensors((args, kwargs)) if tensor in self._marks]
        if not marked:
            return func(*args, **kwargs)
        if inside_checkpoint():
            raise _recomputed(self._marks[marked[0]], marked[0])
        mark, follow = self._marks[marked[0]], _FOLLOWED.get(func)
        if follow is not None and len(marked) == 1 and args and args[0] is marked[0]:
            found = NotImplemented if self._pinned(marked[0], func) else follow(self, mark, func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        wholes = {id(part): self.gathered(part) for part in marked}
        positional, named = map_leaves(lambda value: wholes.get(id(value), value), (args, kwargs))
        result = func(*positional, **named)
        for part in marked:
            self._pinned(part, func)
        return result

    def _pinned(self, part: Tensor, func: Callable) -> bool:
        """Something wrote to the gathered tensor, or `func` watches its gradient: from here on it is what is used."""
        mark = self._marks[part]
        written = mark.whole is not None and mark.whole._version != mark.version
        if not mark.pinned and (written or func in _WATCHING):
            self._alone(part, mark, func)
            mark.pinned = True
        return mark.pinned

    def _alone(self, part: Tensor, mark: Mark, func: Callable) -> None:
        """Views of one tensor share what is written to it; ours, once one is whole, do not."""
        for other, its in self._marks.items():
            if other is not part and its.log == mark.log and storage_key(other) == storage_key(part):
                raise VocabularyError(
                    f"loss: `{func.__name__}`: logits of shape {tuple(mark.shape(part))} are changed or watched in "
                    f"place while a view of them (of shape {tuple(its.shape(other))}) is in use, and they lie in parts "
                    f"over axis {mark.axis.name}; do it before the view is taken, or without changing them in place"
                )

    def keep(self, result: Any, mark: Mark, dim: int | None = None) -> Any:
        """What a function made of a marked part, marked as a part; `dim`: where its cut dim is, if that has moved."""
        if isinstance(result, Tensor) and result not in self._marks:
            self._marks[result] = Mark(mark.axis, mark.sizes, mark.dim if dim is None else dim, mark.log)
        return result


def _recomputed(mark: Mark, part: Tensor) -> PlacementError:
    return PlacementError(
        f"loss: logits of shape {list(mark.shape(part))} are used inside torch.utils.checkpoint, and they lie in parts "
        f"over axis {mark.axis.name}: backward, to which they are parts, would compute the use again. Take what the "
        "loss makes of logits out of the checkpoint, or leave out plan.placement.tensor"
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a function's arguments, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


# ---- functions that are followed: (mode, mark of the first argument, function, its arguments) → result, or
# NotImplemented where the whole tensor is needed


def _asked(mode: SplitLogits, mark: Mark, func: Callable, part: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What the whole tensor answers: its shape, how many elements it has."""
    return func(mark.stand_in(part), *args, **kwargs)


def _told(mode: SplitLogits, mark: Mark, func: Callable, *args: Any, **kwargs: Any) -> Any:
    """What the part and the whole have in common."""
    return func(*args, **kwargs)


def _alike(mode: SplitLogits, mark: Mark, func: Callable, part: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Copies and casts."""
    result = func(part, *args, **kwargs)
    rounded = mark.log and isinstance(result, Tensor) and result.dtype != part.dtype
    return NotImplemented if rounded else mode.keep(result, mark)


def _moved(mode: SplitLogits, mark: Mark, func: Callable, part: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Dims in another order: a tensor of as many different sizes tells where the cut one goes."""
    probe = torch.empty(tuple(range(1, part.dim() + 1)), device="meta")
    dim = func(probe, *args, **kwargs).shape.index(mark.dim + 1)
    return mode.keep(func(part, *args, **kwargs), mark, dim)


def _reshaped(mode: SplitLogits, mark: Mark, func: Callable, part: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Leading dims in another form; sizes in the arguments are those of the whole tensor."""
    result = func(mark.stand_in(part), *args, **kwargs)
    last = mark.dim == part.dim() - 1 and result.dim() > 0 and result.shape[-1] == sum(mark.sizes)
    if not last or result.dtype != part.dtype:
        return NotImplemented
    return mode.keep(part.reshape(*result.shape[:-1], part.shape[-1]), mark, result.dim() - 1)


def _indexed(mode: SplitLogits, mark: Mark, func: Callable, part: Tensor, index: Any) -> Any:
    """Slices, rows and masks of dims before the cut one."""
    if mark.dim != part.dim() - 1 or not _spares_last(index, part.dim()):
        return NotImplemented
    result = part[index]
    return mode.keep(result, mark, result.dim() - 1)


def _spares_last(index: Any, dims: int) -> bool:
    """Indexing a tensor of so many dims leaves its last dim as it is, and last."""
    items = list(index) if isinstance(index, tuple) else [index]
    taken = 0
    for item in items:
        if isinstance(item, Tensor):
            taken += item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
        elif isinstance(item, slice) or (isinstance(item, int) and not isinstance(item, bool)):
            taken += 1
        elif item is not None and item is not Ellipsis:
            return False
    if any(item is Ellipsis for item in items) and items[-1] is not Ellipsis:
        taken = dims  # what follows the ellipsis is counted from the last dim
    return taken < dims or (isinstance(items[-1], slice) and items[-1] == slice(None))


def _parted(
    mode: SplitLogits, mark: Mark, func: Callable, part: Tensor, size: int | list[int], dim: int = 0
) -> tuple[Tensor, ...] | Any:
    """`split` and `chunk` along another dim."""
    if dim % part.dim() == mark.dim:
        return NotImplemented
    return tuple(mode.keep(piece, mark) for piece in func(part, size, dim))


# ---- what is computed from the parts


def _cross_entropy(
    mode: SplitLogits,
    mark: Mark,
    func: Callable,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy`; and `F.nll_loss`, if what it gets is the logarithm of a softmax."""
    classes = 0 if input.dim() == 1 else 1
    usual = weight is None and size_average is None and reduce is None and reduction in ("none", "mean", "sum")
    numbered = not target.is_floating_point() and target.shape == (*input.shape[:classes], *input.shape[classes + 1 :])
    if mark.dim != classes or mark.log != (func is F.nll_loss) or not usual or not numbered:
        return NotImplemented
    return vocabulary_cross_entropy(
        input.movedim(classes, -1),
        target,
        mark.axis,
        sizes=mark.sizes,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _log_softmax(
    mode: SplitLogits, mark: Mark, func: Callable, part: Tensor, dim: Any = None, *more: Any, **options: Any
) -> Any:
    """A stand-in, whose logarithm of the softmax is taken where it is asked for other things than `F.nll_loss`."""
    if not isinstance(dim, int) or dim % part.dim() != mark.dim or mark.log:
        return NotImplemented
    dtypes = [value for value in (*more, *options.values()) if isinstance(value, torch.dtype)]
    logits = part.to(dtypes[0]) if dtypes else part
    return mode.keep(logits.view_as(logits), replace(mark, log=True))


def _logsumexp(
    mode: SplitLogits, mark: Mark, func: Callable, part: Tensor, dim: Any = None, keepdim: bool = False
) -> Any:
    if not isinstance(dim, int) or dim % part.dim() != mark.dim or mark.log:
        return NotImplemented
    found = vocabulary_logsumexp(part.movedim(mark.dim, -1), mark.axis, sizes=mark.sizes)
    return found.unsqueeze(mark.dim) if keepdim else found


def _getter(name: str) -> Callable[..., Any]:
    """What a mode sees where a property of a tensor is read."""
    return getattr(Tensor, name).__get__


_FOLLOWS: dict[Callable[..., Any], tuple[Any, ...]] = {
    _asked: (_getter("shape"), Tensor.size, Tensor.numel, Tensor.nelement, torch.numel, Tensor.__len__),
    _told: (
        *map(_getter, ("dtype", "device", "layout", "ndim", "itemsize", "requires_grad", "is_leaf")),
        *map(_getter, ("is_cpu", "is_cuda", "is_meta", "is_sparse")),
        *(Tensor.dim, Tensor.ndimension, Tensor.element_size, Tensor.get_device),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
    ),
    _alike: (
        *(Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.cpu, Tensor.cuda),
        *(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach, torch.detach),
    ),
    _moved: (
        *(Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.movedim, torch.movedim),
        *(Tensor.swapaxes, torch.swapaxes, Tensor.t, torch.t, _getter("mT")),
    ),
    _reshaped: (
        *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten),
        *(Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze),
    ),
    _indexed: (Tensor.__getitem__,),
    _parted: (Tensor.split, torch.split, Tensor.chunk, torch.chunk),
    _cross_entropy: (F.cross_entropy, F.nll_loss),
    _log_softmax: (F.log_softmax, torch.log_softmax, Tensor.log_softmax),
    _logsumexp: (Tensor.logsumexp, torch.logsumexp),
}
_FOLLOWED = {func: follow for follow, functions in _FOLLOWS.items() for func in functions}

_WATCHING = {Tensor.register_hook, Tensor.retain_grad}
"""They have to do with the gradient of this very tensor, to which every later use must add."""
