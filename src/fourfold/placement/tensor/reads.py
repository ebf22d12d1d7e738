"""Weights that are read outside of what splits them: a block of a weight is not the weight.

A linear, a norm or a table that is taken over knows that it holds a block. A penalty in the loss, or a mean of a
weight in some forward, would see the block and know nothing of it. So such calls are found while the whole model is
rehearsed, at any size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.anatomy.blocks import Calls
from fourfold.placement.refusals import PlacementError
from fourfold.torch_private import leaves

Shape = tuple[int, ...]

REDUCTIONS = frozenset(
    "sum mean prod norm vector_norm matrix_norm std var std_mean var_mean max min amax amin logsumexp softmax "
    "log_softmax cumsum cumprod sort argsort topk median normalize count_nonzero all any dist trace".split()
)
"""What they make of a part is not a part of what they make of the whole."""

VIEWS = frozenset(
    "t view reshape flatten unflatten transpose permute unsqueeze squeeze contiguous detach to type float double half "
    "bfloat16 clone expand".split()
)
"""They give the same elements again."""

CASTS = frozenset("contiguous detach to type float double half bfloat16 clone".split())
"""Those that leave every dim where it is."""

CONTRACTIONS = frozenset(
    "linear matmul __matmul__ __rmatmul__ mm bmm addmm einsum embedding layer_norm rms_norm group_norm".split()
)
"""The anatomy knows their weights, wherever they are called."""


class Reads(TorchFunctionMode):
    """Refuses calls that would have to see a whole weight of which ranks hold blocks."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, Shape], linears: Collection[str], calls: Calls) -> None:
        """Watch a whole model.

        Args:
            blocks: shapes that its weights have on a rank, by name.
            linears: weights and biases that the model's forward may use in their linears alone, though no rank need
                hold blocks of them: elsewhere the gradient might be of a part of the features.
            calls: of its modules, while they are watched.
        """
        super().__init__()
        self.calls = calls
        self._cut: dict[int, tuple[str, Tensor, tuple[int, ...] | None]] = {}
        for name, weight in model.named_parameters():
            shape = blocks.get(name, tuple(weight.shape))
            dims = tuple(dim for dim, (a, b) in enumerate(zip(weight.shape, shape, strict=True)) if a != b)
            if dims or name in linears:
                self._cut[id(weight)] = name, weight, dims

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        found = next((self._cut[id(one)] for one in leaves((args, kwargs or {})) if id(one) in self._cut), None)
        tensors = [one for one in leaves(result) if isinstance(one, Tensor)]
        if found is None or not tensors:
            return result
        name, _, dims = found
        function = getattr(func, "__name__", str(func))
        if function in VIEWS or function == "__get__":
            left = dims if dims == () or function in CASTS else None  # where its dims go is not followed
            for one in tensors:  # kept, so that its id stays its own
                self._cut.setdefault(id(one), (name, one, left))
        elif self._amiss(function, dims, args, kwargs or {}):
            where = self.calls.inside or ("the model" if self.calls.running else "the loss")
            raise PlacementError(
                f"{name}: {where} calls {function} on it: expected its use by its own module alone, of which "
                "plan.placement.tensor gives a rank a part. Take penalties on weights from the optimizer "
                "(weight_decay), or leave out plan.placement.tensor"
            )
        return result

    def _amiss(
        self, function: str, dims: tuple[int, ...] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        if not self.calls.running:  # in the loss, whatever makes numbers of a weight that is cut
            return (
                dims != ()
                and function not in CONTRACTIONS
                and not function.startswith("new_")
                and not function.endswith("_like")
            )
        first = next(iter(args), None)
        if function not in REDUCTIONS or not isinstance(first, Tensor) or id(first) not in self._cut:
            return False
        place = 2 if function == "norm" else 1
        along = kwargs.get("dim", args[place] if len(args) > place else None)
        if along is None or dims == ():
            return True
        if dims is None:  # of a view: the comparison of values tells
            return False
        chosen = along if isinstance(along, tuple | list) else (along,)
        size = first.dim()
        return any(isinstance(dim, int) and dim % size in dims for dim in chosen)
