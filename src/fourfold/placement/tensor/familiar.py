"""Batches of other shapes than the one that a split model was rehearsed on.

Code may ask how long a sequence is, and call other functions then, which nobody has compared. So the first batch of
every new shape is led through the model dry, which costs one forward without values, and if it calls something else
there the split model is rehearsed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.anatomy.blocks import Calls
from fourfold.placement.tensor.rehearsal import Stage


class Familiar:
    """Shapes of rows that a model was led through, and the paths that it took: functions, in modules, in order."""

    def __init__(self, stage: Stage) -> None:
        """The batch of the rehearsal is familiar."""
        self._stage = stage
        self._shapes = {_shapes(stage.batch)}
        self._paths: set[int] = set()
        self._model: nn.Module | None = None

    def new_path(self, batch: Mapping[str, Tensor]) -> int | None:
        """The path of a batch, if it is not familiar. How many rows there are does not count."""
        if self._stage.kind == "real" or _shapes(batch) in self._shapes:
            return None
        if not self._paths:
            self._paths.add(self._path(self._stage.batch))
        path = self._path(batch)
        if path not in self._paths:
            return path
        self.learn(batch, path)
        return None

    def learn(self, batch: Mapping[str, Tensor], path: int) -> None:
        """From here on batches like this one are familiar."""
        self._shapes.add(_shapes(batch))
        self._paths.add(path)

    def _path(self, batch: Mapping[str, Tensor]) -> int:
        with self._stage.entered():
            self._model = model = self._model or self._stage.twin({})
            calls, inputs = Calls(), {name: self._stage.same(tensor) for name, tensor in batch.items()}
            with calls.watching(model), _Path(calls) as path:
                self._stage.loss(model, inputs)
        return hash(tuple(path.taken))


def _shapes(batch: Mapping[str, Tensor]) -> frozenset[Any]:
    return frozenset((name, tensor.shape[1:], tensor.dtype) for name, tensor in batch.items())


class _Path(TorchFunctionMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls
        self.taken: list[tuple[str, str]] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in ("__get__", "__set__") and self.calls.running:
            self.taken.append((self.calls.inside, name))
        return func(*args, **(kwargs or {}))
