"""What a codec and a rule promise. (An order's promise, `Order`, lives with the types of `schedule`.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from fourfold.ledger import Ledger
    from fourfold.plan.events import GradientReady


class Codec(Protocol):
    """A form in which a flat tensor crosses between devices.

    Laws, held by the property tests for every codec: zero in, zero out; `decode(encode(x))` is idempotent where
    the codec is a projection; every rank decodes the same bytes to the same bits; the payload's size is exactly
    `wire_bytes`.
    """

    exact: bool
    """decode(encode(x)) == x, bit for bit."""
    contraction: float
    """d with ||x - decode(encode(x))||^2 <= (1 - d) ||x||^2; 1.0 when exact."""
    rides_allreduce: bool
    """The sum of encoded payloads decodes to the sum: the payload may be reduced in its encoded form."""

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """A flat payload (any dtype) for a flat tensor."""
        ...

    def decode(self, payload: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The flat tensor of `numel` elements that the payload stands for."""
        ...

    def wire_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the payload for `numel` elements of `itemsize` bytes."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything mutable (residuals, thresholds)."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        ...


class Rule(Protocol):
    """When and what replicas exchange. A rule listens to gradients becoming ready and finishes before the update."""

    exact: bool
    """Replicas under this rule equal one serial process."""
    sums: bool
    """In every step it makes of what is published the sum over the replicas, whatever it is."""

    def on_ready(self, event: GradientReady) -> None:
        """A unit's gradient is complete on this replica: start exchanging it, or keep it for `finish`."""
        ...

    def finish(self) -> None:
        """Every exchange of this step is complete: gradients are final."""
        ...

    def forecast(self, ledger: Ledger, sizes: Sequence[int], itemsize: int) -> None:
        """Add what one step exchanges for gradients of `sizes` elements of `itemsize` bytes, one entry a unit."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything mutable."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        ...
