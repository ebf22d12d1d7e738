"""Selective recomputation: only the attention core is computed again in backward.

Its activations grow with the square of the sequence and cost few operations (Korthikanti et al. 2022, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fourfold.randomness.capture import capture


class recompute_attention(TorchFunctionMode):
    """While entered, `scaled_dot_product_attention` keeps its inputs only and runs again in backward."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        again = capture()

        def core(*inputs: Any, **settings: Any) -> Any:
            with again():
                return F.scaled_dot_product_attention(*inputs, **settings)

        return checkpoint(core, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
