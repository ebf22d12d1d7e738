"""Embeddings whose rows lie over y: each rank looks up what it holds, and the ranks add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.wire import Axis, ops


class TableExecutor(Executor):
    """An embedding of which this rank holds the rows `rows`. Columns may be cut as well: they need nothing.

    The module's own code runs around the lookup: offsets of positions, scales.
    """

    def __init__(self, switch: Switch, module: nn.Module, axis: Axis, rows: range) -> None:
        super().__init__(switch, module)
        self.axis, self.rows = axis, rows

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Indices [...] → [..., columns here]."""
        with _Lookups(self):
            return self.inner(*args, **kwargs)

    def table(self, weight: Tensor) -> Tensor:
        """The rows [rows, columns] to look up in, from the weight that is here."""
        return weight

    def joined(self, found: Tensor) -> Tensor:
        """What all ranks found, from what this one did: its own rows, and zeros."""
        return ops.sum_identity(found, self.axis, "embedding")


class _Lookups(TorchFunctionMode):
    def __init__(self, table: TableExecutor) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.embedding:
            return self._look_up(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _look_up(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *unused: Any, **settings: Any
    ) -> Tensor:
        """What others hold counts as zero here; a sum with zeros is exact. Other settings are refused (`split`)."""
        rows = self.table.rows
        here = (input >= rows.start) & (input < rows.stop)
        at = (input - rows.start).clamp(0, len(rows) - 1)
        pad = None if padding_idx is None or padding_idx not in rows else padding_idx - rows.start
        found = F.embedding(at, self.table.table(weight), pad).masked_fill_(~here.unsqueeze(-1), 0)
        return self.table.joined(found)
