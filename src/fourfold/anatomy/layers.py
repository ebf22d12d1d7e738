"""A model as a line of layers, and what each of them needs of those before: where a pipeline can cut it.

The layers are calls of modules, in the order in which they run: the repeated blocks, and outside of these the outermost
modules that have weights and hold no block (embeddings, the last norm, the head). What the model's own code, and the
loss, do between them is *glue*: it belongs to no layer, and any process can run it again. What may cross a cut is
therefore an output of a layer: `needs` tells which outputs of which layers each layer asks for, directly or by glue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.anatomy.blocks import Calls
from fourfold.anatomy.nest import replaced, tensors
from fourfold.anatomy.rehearsal import Rehearsal
from fourfold.anatomy.ties import own_names
from fourfold.anatomy.twin import twins

INSIDE = -1
"""The leaf of what was made inside a layer and got out of it by another way than its result (a hook, an attribute)."""

LOOKS = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "equal", "allclose"})
"""Functions that give values of a tensor to Python."""


class LayerError(ValueError):
    """A model that is no line of layers: says where, and why."""


class Value(NamedTuple):
    """An output of a layer: the `leaf`-th tensor of what layer number `layer` returned (INSIDE: none of these)."""

    layer: int
    leaf: int


@dataclass(frozen=True)
class Layer:
    """One call of a module.

    Attributes:
        path: of the module.
        needs: outputs of earlier layers that it asks for.
        reads: parameters that it reads, and those that the glue before it reads for it; by their own names.
        result: what it returned, tensors without values in it.
        draws: how many dropouts it draws, if it is no block (whose dropouts have a scope of their own).
    """

    path: str
    needs: frozenset[Value]
    reads: frozenset[str]
    result: Any = field(compare=False, repr=False, default=None)
    draws: int = 0


@dataclass(frozen=True)
class Layers:
    """All layers of a model, in order.

    Attributes:
        calls: one entry a call; a module that runs twice is there twice.
        needs, reads: as those of a layer, of what comes after the last one: the loss.
        looks: glue that looks at values of outputs, or changes them in place, one line each: it cannot run again.
    """

    calls: tuple[Layer, ...]
    needs: frozenset[Value]
    reads: frozenset[str]
    looks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.calls)

    def crossing(self, cut: int) -> tuple[Value, ...]:
        """What crosses before layer `cut`: outputs of the layers before it that it or a later one needs, in order."""
        later = self.needs.union(*(layer.needs for layer in self.calls[cut:]))
        return tuple(sorted(value for value in later if value.layer < cut))

    def weights(self, first: int, last: int) -> frozenset[str]:
        """The parameters that layers [first, last) read, with the loss's if they end the model."""
        ends = self.reads if last == len(self.calls) else frozenset()
        return ends.union(*(layer.reads for layer in self.calls[first:last]))


def layers(model: nn.Module, loss: Callable[..., Any], batch: Mapping[str, Tensor], blocks: Sequence[str]) -> Layers:
    """Run `loss(model, batch)` once on a twin of the model, without values if its code allows that.

    Args:
        blocks: paths of the model's blocks (`Anatomy.blocks`).

    Raises:
        LayerError: the forward runs in no way.
    """
    failures = []
    for attempt in twins(model, batch, lambda source: source):
        flow = Flow(attempt.model, blocks)
        try:
            with torch.no_grad(), attempt.mode, flow.watching():
                end = loss(attempt.model, attempt.batch)
        except Exception as error:  # any operator may refuse meta or fake tensors, each in its own way
            failures.append(f"{attempt.kind}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        return flow.found(end)
    raise LayerError(f"{type(model).__name__}: its forward runs in no way; " + "; ".join(failures))


class Flow(TorchFunctionMode):
    """Follows, through one forward, from which outputs of layers every tensor comes."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self._model, self._blocks = model, frozenset(blocks)
        self._rehearsal = Rehearsal(Calls())
        self._open: str | None = None
        self._calls: list[str] = []
        self._needs: list[set[Value]] = []
        self._results: list[Any] = []
        self._drawn: list[int] = []
        self._reads: list[set[str]] = []
        self._looks: dict[str, None] = {}
        self._origins: dict[int, tuple[frozenset[Value], frozenset[str]]] = {}
        self._kept: list[Tensor] = []  # an id is a tensor's only while it lives
        names = own_names(model)
        for parameter in model.parameters():
            self._origins[id(parameter)] = frozenset(), frozenset({names[id(parameter)]})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow all that happens in this context."""
        calls = Calls()
        self._rehearsal = rehearsal = Rehearsal(calls)  # dropouts are noted, not drawn
        with ExitStack() as stack:
            for path, module in self._model.named_modules():
                if self._may_be_layer(path, module):
                    stack.callback(
                        module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True).remove
                    )
                    stack.callback(module.register_forward_hook(partial(self._leave, path), prepend=True).remove)
            stack.enter_context(calls.watching(self._model))
            stack.enter_context(rehearsal)
            stack.enter_context(self)
            yield

    def found(self, end: Any) -> Layers:
        """The layers, once the forward and the loss have given `end`."""
        needs, reads = self._origin(end)
        calls = tuple(
            Layer(
                path,
                frozenset(value for value in self._needs[number] if value.layer != number),
                frozenset(self._reads[number]),
                self._results[number],
                0 if path in self._blocks else self._drawn[number],
            )
            for number, path in enumerate(self._calls)
        )
        return Layers(calls, needs, reads, tuple(self._looks))

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        needs, reads = self._origin((args, kwargs))
        name = getattr(func, "__name__", str(func))
        if self._open is not None:
            self._needs[-1] |= needs
            self._reads[-1] |= reads
        elif needs and name in LOOKS:
            self._looks[f"{name} after {self._calls[-1]}"] = None
        result = func(*args, **(kwargs or {}))
        changes = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
        if self._open is not None:
            self._mark(result, frozenset({Value(len(self._calls) - 1, INSIDE)}), frozenset())
        elif needs or reads:
            if changes and self._origin(args[0])[0]:
                self._looks[f"{name} (in place) after {self._calls[-1]}"] = None
            self._mark((result, args[0] if changes else None), needs, reads)
        return result

    def _may_be_layer(self, path: str, module: nn.Module) -> bool:
        """It has weights, is in no block, holds none, and is no mere container."""
        if any(
            path.startswith(f"{block}.") or f"{block}.".startswith(f"{path}." if path else "") for block in self._blocks
        ):
            return path in self._blocks
        if path == "" or isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            return False
        return any(True for _ in module.parameters())

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._open is not None:
            return
        self._open = path
        needs, reads = self._origin((args, kwargs))
        own = (self._origins[id(weight)][1] for weight in module.parameters())
        self._calls.append(path)
        self._needs.append(set(needs))
        self._reads.append(set(reads.union(*own)))
        self._drawn.append(-len(self._rehearsal.seen))

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._open != path:
            return
        self._open = None
        self._results.append(replaced(output, lambda tensor: tensor.new_empty(0, device="meta")))
        self._drawn[-1] += len(self._rehearsal.seen)
        for leaf, tensor in enumerate(tensors(output)):
            self._set(tensor, frozenset({Value(len(self._calls) - 1, leaf)}), frozenset())

    def _origin(self, value: Any) -> tuple[frozenset[Value], frozenset[str]]:
        found = [self._origins[id(tensor)] for tensor in tensors(value) if id(tensor) in self._origins]
        if not found:
            return frozenset(), frozenset()
        if len(found) == 1:
            return found[0]
        return frozenset().union(*(needs for needs, _ in found)), frozenset().union(*(reads for _, reads in found))

    def _mark(self, value: Any, needs: frozenset[Value], reads: frozenset[str]) -> None:
        for tensor in tensors(value):
            before = self._origins.get(id(tensor), (frozenset(), frozenset()))
            self._set(tensor, needs | before[0], reads | before[1])

    def _set(self, tensor: Tensor, needs: frozenset[Value], reads: frozenset[str]) -> None:
        self._origins[id(tensor)] = needs, reads
        self._kept.append(tensor)
