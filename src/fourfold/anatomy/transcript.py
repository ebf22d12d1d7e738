"""What a forward did, written down: every function of torch that it called, and every entry and exit of a module.

It is written once and read many times: which module to run whole is found by trying, and a forward costs far more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.anatomy.rehearsal import Rehearsal
from fourfold.anatomy.roles import BatchNorm
from fourfold.anatomy.ties import own_names
from fourfold.torch_private import inside_checkpoint, leaves, map_leaves, undispatched


class Ref(NamedTuple):
    """Stands for a tensor: its number (a changed tensor keeps it), shape, and whether it holds real numbers."""

    number: int
    shape: tuple[int, ...]
    floating: bool


class Op(NamedTuple):
    """A function that the model's code called, in module `where`, with `Ref`s for tensors; `draws` dropouts in it."""

    name: str
    where: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    draws: int = 0

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """By place or by name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    @property
    def operands(self) -> list[Ref]:
        """All tensors that it was given, in order."""
        return refs((self.args, self.kwargs))

    @property
    def results(self) -> list[Ref]:
        """Those of its results that hold real numbers."""
        return [ref for ref in refs(self.result) if ref.floating]


class Enter(NamedTuple):
    """A module's forward begins with these inputs."""

    path: str
    inputs: tuple[Ref, ...]


class Leave(NamedTuple):
    """A module's forward ends with these outputs (the floating ones)."""

    path: str
    outputs: tuple[Ref, ...]


Event = Op | Enter | Leave


def refs(value: Any) -> list[Ref]:
    """All `Ref`s in a nest of tuples, lists and dicts."""
    return [leaf for leaf in leaves(value, is_ref) if is_ref(leaf)]


def is_ref(value: Any) -> bool:
    """It stands for a tensor."""
    return isinstance(value, Ref)


class Transcript(TorchFunctionMode):
    """Writes down one forward.

    Attributes:
        events: in order.
        parameters: number of a parameter's tensor → its own name.
        buffers: number of a buffer's tensor → its name, and how many dims it has.
        batch_norms: calls that take statistics over the rows of a batch.
    """

    def __init__(self, model: nn.Module, rehearsal: Rehearsal) -> None:
        """Nothing is written yet; `rehearsal` is entered around this mode, so that it gets what dropouts are."""
        super().__init__()
        self.events: list[Event] = []
        self.batch_norms: list[BatchNorm] = []
        self.rehearsal = rehearsal
        self._open: list[str] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # an id is a tensor's only while it lives
        names = own_names(model)
        self.parameters = {self._ref(weight).number: names[id(weight)] for weight in model.parameters()}
        self.buffers = {self._ref(one).number: (name, one.dim()) for name, one in model.named_buffers()}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Also write down the calls of all modules of `model`, for the time of the context."""
        hooks = []
        for path, module in model.named_modules():
            enter, leave = self._entering(path), self._leaving(path)
            hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(leave, prepend=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # its inside matters, and is hidden from a mode otherwise
            with self:
                return undispatched(func)(*args, **kwargs)
        if func in (F.batch_norm, torch.batch_norm):
            self._note_batch_norm(args, kwargs)
        before = len(self.rehearsal.seen)
        result = func(*args, **kwargs)
        draws = len(self.rehearsal.seen) - before
        if self._open or draws:  # what a loss does to the model's outputs is no part of it, but its dropouts count
            self._write(func, args, kwargs, result, draws)
        return result

    def _write(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any, draws: int) -> None:
        name = _name(func)
        if name == "__setitem__" or any(isinstance(value, Tensor) for value in leaves(result)):
            where = self._open[-1] if self._open else ""
            self.events.append(Op(name, where, self._plain(args), self._plain(kwargs), self._plain(result), draws))

    def _note_batch_norm(self, args: tuple, kwargs: dict[str, Any]) -> None:
        # torch.batch_norm has the affine weights before the running statistics; both have the flag in the sixth place.
        if args[5] if len(args) > 5 else kwargs.get("training"):
            x = args[0] if args else kwargs["input"]
            where, repeated = self._open[-1] if self._open else "", inside_checkpoint()
            self.batch_norms.append(BatchNorm(where, x.shape[1], x.requires_grad, repeated))

    def _plain(self, value: Any) -> Any:
        return map_leaves(lambda leaf: self._ref(leaf) if isinstance(leaf, Tensor) else leaf, value)

    def _ref(self, tensor: Tensor) -> Ref:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._numbers)
            self._kept.append(tensor)
        floating = tensor.is_floating_point() or tensor.is_complex()
        return Ref(self._numbers[id(tensor)], tuple(tensor.shape), floating)

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._open.append(path)
            self.events.append(Enter(path, self._floating((args, kwargs))))

        return enter

    def _leaving(self, path: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._open.pop()
            self.events.append(Leave(path, self._floating(output)))

        return leave

    def _floating(self, value: Any) -> tuple[Ref, ...]:
        found = [self._ref(leaf) for leaf in leaves(value) if isinstance(leaf, Tensor)]
        return tuple(ref for ref in found if ref.floating)


def _name(func: Any) -> str:
    """Of a function or method; of a property for its getter; without the mark of working in place."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return func.__self__.__name__
    return name.rstrip("_") if not name.startswith("__") else name
