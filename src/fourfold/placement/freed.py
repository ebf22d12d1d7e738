"""A freed weight: a registered parameter of full shape whose values are not here.

An operator on a tensor without storage reads address 0: some of torch's kernels say so, others take the process down.
So a freed parameter changes its class, as torch's own `UninitializedParameter` does, to one that answers what it can
answer without values and refuses the rest by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.placement.refusals import PlacementError
from fourfold.torch_private import leaves, without_torch_function

_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Properties that give a tensor over the parameter's storage. All others tell of it without its values."""

_ALLOWED = frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.dim_order),
        *(Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous, Tensor.is_same_size, Tensor.element_size),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.get_device, Tensor.is_pinned),
        *(Tensor.is_shared, Tensor.is_inference, Tensor.is_conj, Tensor.is_neg),
        *(Tensor.untyped_storage, Tensor.data_ptr, Tensor.__hash__, Tensor.__format__, Tensor.__dir__),
        *(Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
        *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full),
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
        *(torch.numel, torch.is_floating_point, torch.is_complex),
    }
)


class Freed(nn.Parameter):
    """What the class of a parameter is while its values are elsewhere.

    Attributes:
        logical_name: for messages.
        bring: brings the values here, if that takes no other rank: then whoever asks for them gets them.
        present: its class while the values are here.
    """

    logical_name: str
    bring: Callable[[], None] | None
    present: type[nn.Parameter]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if self.bring is not None:
            self.bring()
            return repr(self)
        return f"Parameter containing: {self.logical_name}, {list(self.shape)}, {self.dtype}, freed: see run.gathered()"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _ALLOWED or _tells(func):
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        for value in leaves((args, kwargs)):
            if isinstance(value, Freed):
                _fetch(value, getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def _fetch(parameter: Freed, purpose: str) -> None:
    if parameter.bring is None:
        raise PlacementError(
            f"{parameter.logical_name}: {purpose} asks for the values of a weight that was read while it was freed: "
            "plan.placement.shard: parameters gathers a block's weights only for its own forward and backward. Read "
            "them within `with run.gathered():`, or take run.logical_state(); set them by load_state_dict. What the "
            "model or the loss reads outside of the block for the first batch is kept whole; what it begins to read "
            "later is not: shard: gradients keeps all weights whole"
        )
    parameter.bring()


def _tells(func: Any) -> bool:
    """The access of a property that does not give values."""
    name = getattr(getattr(func, "__self__", None), "__name__", None)
    return type(func).__name__ == "method-wrapper" and name is not None and name not in _VALUES


def hide(parameters: Mapping[str, nn.Parameter], bring: Callable[[], None] | None) -> None:
    """The values of these parameters, by logical name, have gone; `bring` as in `Freed`."""
    for name, parameter in parameters.items():
        present = type(parameter)
        parameter.__class__ = Freed
        assert isinstance(parameter, Freed)
        parameter.present = present
        parameter.logical_name, parameter.bring = name, bring


def show(parameters: Iterable[nn.Parameter]) -> None:
    """The values of these parameters are here again."""
    for parameter in parameters:
        assert isinstance(parameter, Freed)
        parameter.__class__ = parameter.present  # pyright: ignore[reportAttributeAccessIssue] - a class above Freed
