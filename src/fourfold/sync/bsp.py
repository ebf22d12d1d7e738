"""Bulk-synchronous parallel: replicas sum every gradient before every update (Valiant 1990).

The sums of one unit travel while backward computes the units before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.ledger import Ledger
from fourfold.plan import Codec, Events, GradientReady
from fourfold.wire import Axis, Work, formulas


@dataclass(frozen=True)
class Options:
    """Settings.

    Attributes:
        overlap: sums travel during backward; off: the same sums, waited for at once (the bits are the same).
    """

    overlap: bool = True


class Rule:
    """Sum each unit's gradient over the replicas as soon as it is ready."""

    exact = True
    sums = True

    def __init__(self, options: Options, axis: Axis, events: Events, codec: Codec | None = None):
        """Listen to `events` and exchange over `axis`; gradients cross in the form that `codec` gives them."""
        self.options, self.axis, self.codec = options, axis, codec
        self._pending: list[Work] = []
        events.subscribe(self.on_ready)

    def on_ready(self, event: GradientReady) -> None:
        """Begin to sum a unit's gradient."""
        if self.axis.size == 1:
            return
        for earlier in self._pending:
            earlier.advance()
        work = self.axis.all_reduce(event.gradient, "gradient", codec=self.codec)
        if self.options.overlap:
            self._pending.append(work)
        else:
            work.wait()

    def finish(self) -> None:
        """Every sum is complete when this returns."""
        for work in self._pending:
            work.wait()
        self._pending.clear()

    def forecast(self, ledger: Ledger, sizes: Sequence[int], itemsize: int) -> None:
        """One all-reduce a unit: an exchange of parts and a gather of sums."""
        size, index = self.axis.size, self.axis.index
        if size == 1:
            return
        for count in sizes:
            parts = [self._payload(part, itemsize) for part in formulas.shares(count, size)]
            nbytes = sum(parts) - parts[index] + (size - 1) * parts[index]
            ledger.send(self.axis.name, "gradient", "all_reduce", nbytes)

    def _payload(self, count: int, itemsize: int) -> int:
        return self.codec.wire_bytes(count, itemsize) if self.codec else count * itemsize

    def state_dict(self) -> dict[str, Any]:
        """The codec's state; the rule itself has none between steps."""
        return {"codec": self.codec.state_dict()} if self.codec else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        if self.codec and "codec" in state:
            self.codec.load_state_dict(state["codec"])
