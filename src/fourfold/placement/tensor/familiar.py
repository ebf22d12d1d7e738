"""Batches of other shapes than the one that a split model was rehearsed on.

Code may ask how long a sequence is, and call other functions then, which nobody has compared; and where time is cut, so
is what dropouts take, otherwise at every length. So the first batch of every new shape is led through the model dry,
which costs one forward without values, and if something is new there the split model is rehearsed again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold import randomness
from fourfold.anatomy.blocks import Calls
from fourfold.anatomy.rehearsal import Rehearsal, sites
from fourfold.placement.tensor.rehearsal import Stage

Dropped = Mapping[str, tuple[randomness.Cut, ...]]
"""By site, how the tensors that dropouts take are cut."""


class Familiar:
    """Shapes of rows that a model was led through, and the paths that it took there.

    A path: which functions ran in which modules, in order, and how many entries the cut dims have that dropouts take.
    """

    def __init__(self, stage: Stage, blocks: Collection[str], dropped: Dropped) -> None:
        """The batch of the rehearsal is familiar.

        Args:
            stage: of the rehearsal.
            blocks: paths of the model's blocks.
            dropped: found by the rehearsal.
        """
        self._stage, self._blocks, self._first = stage, blocks, dropped
        self._shapes = {_shapes(stage.batch): dropped}
        self._paths: dict[int, Dropped] = {}
        self._model: nn.Module | None = None

    def new_path(self, batch: Mapping[str, Tensor]) -> int | None:
        """The path of a batch, if it is not familiar. How many rows there are does not count."""
        if _shapes(batch) in self._shapes:
            return None
        if self._on_values and not self._first:
            self._shapes[_shapes(batch)] = self._first
            return None
        if not self._paths:
            self._paths[self._path(self._stage.batch)] = self._first
        path = self._path(batch)
        if path not in self._paths:
            return path
        self._shapes[_shapes(batch)] = self._paths[path]
        return None

    def learn(self, batch: Mapping[str, Tensor], path: int, dropped: Dropped) -> None:
        """From here on this path is familiar, and batches like this one are."""
        self._shapes[_shapes(batch)] = self._paths[path] = dropped

    def dropped(self, batch: Mapping[str, Tensor]) -> Dropped:
        """Of a familiar batch."""
        return self._shapes[_shapes(batch)]

    @property
    def _on_values(self) -> bool:
        """Which functions run may hang on values, which are not at hand: they are no part of a path then."""
        return self._stage.kind == "real"

    def _path(self, batch: Mapping[str, Tensor]) -> int:
        calls = Calls()
        drawn, taken = Rehearsal(calls), _Taken(calls)
        with self._stage.entered():
            self._model = model = self._model or self._stage.twin({})
            inputs = {name: self._stage.same(tensor) for name, tensor in batch.items()}
            with calls.watching(model), taken, drawn:
                self._stage.loss(model, inputs)
        seen = sites(drawn.seen, calls.done, self._blocks)
        sizes = [
            (site, seen[site].shape[cut.dim]) for site, cuts in self._first.items() for cut in cuts if site in seen
        ]
        return hash((tuple(() if self._on_values else taken.functions), tuple(sizes)))


def _shapes(batch: Mapping[str, Tensor]) -> frozenset[Any]:
    return frozenset((name, tensor.shape[1:], tensor.dtype) for name, tensor in batch.items())


class _Taken(TorchFunctionMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls
        self.functions: list[tuple[str, str]] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in ("__get__", "__set__") and self.calls.running:
            self.functions.append((self.calls.inside, name))
        return func(*args, **(kwargs or {}))
