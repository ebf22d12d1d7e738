"""A tape of what a constructor does to tensors, below autograd and below every helper that it may use.

The model is built on meta (or, if its constructor refuses, truly on CPU) under a dispatch mode that writes down each
operation that makes or changes a storage. Views need no entry: an operand is known by its storage and its geometry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fourfold.torch_private import dispatch_mode, leaves, map_leaves, storage_key


class Ref(NamedTuple):
    """A tensor on the tape: a window on storage number `storage`, which holds `total` elements of this dtype."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    total: int

    @property
    def numel(self) -> int:
        """Elements in the window."""
        return torch.Size(self.size).numel()

    @property
    def run(self) -> bool:
        """Whether the window is one run of elements in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def full(self) -> bool:
        """Whether the window is the whole storage, in row-major order."""
        return self.offset == 0 and self.numel == self.total and self.run


class Entry(NamedTuple):
    """One operation, `func(*args, **kwargs)` with tensors as `Ref`: its new tensors `made`, its changed ones `written`.

    `func` None is a constant: `args[0]` is a real tensor, the value of the storage of `made[0]`.
    """

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    made: tuple[Ref, ...]
    written: tuple[Ref, ...]

    @property
    def name(self) -> str:
        """The operation's name without overload: "aten::normal_"."""
        return "constant" if self.func is None else self.func._schema.name

    @property
    def reads(self) -> tuple[Ref, ...]:
        """All operands that are tensors."""
        return () if self.func is None else tuple(v for v in leaves((self.args, self.kwargs), _is_ref) if _is_ref(v))


@dataclass
class Tape:
    """Entries in order; `writers[storage]` are the indices of those that make or change it."""

    entries: list[Entry] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        for ref in entry.made + entry.written:
            indices = self.writers.setdefault(ref.storage, [])
            if not indices or indices[-1] != len(self.entries):
                indices.append(len(self.entries))
        self.entries.append(entry)

    def ref(self, tensor: Tensor) -> Ref:
        """The tensor as a window; a real tensor that no entry made becomes a constant."""
        ref = self._window(tensor)
        if ref.storage not in self.writers and not tensor.is_meta:
            value = tensor.detach().as_strided((ref.total,), (1,), 0).clone()
            self.add(Entry(None, (value,), {}, (ref,), ()))
        return ref

    def made(self, tensor: Tensor) -> Ref:
        """The window of a tensor that the current entry makes."""
        return self._window(tensor)

    def seal(self) -> None:
        """Let go of the tensors: recording has ended, and storages may be freed."""
        self.numbers.clear()
        self.kept.clear()

    def _window(self, tensor: Tensor) -> Ref:
        key = storage_key(tensor)
        if key not in self.numbers:
            # A kept tensor keeps its storage, so that the key is not given to another one.
            self.kept.append(tensor.detach())
            self.numbers[key] = len(self.numbers)
        total = tensor.untyped_storage().nbytes() // tensor.element_size()
        offset = int(tensor.storage_offset())
        return Ref(self.numbers[key], tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset, total)


def _is_ref(value: Any) -> bool:
    return isinstance(value, Ref)


def _draws_nothing(func: Any, args: tuple) -> bool:
    """A random operation in place on meta, which has no values: torch would import its compiler to do nothing."""
    in_place = func._schema.name.endswith("_") and torch.Tag.nondeterministic_seeded in func.tags
    return in_place and args[0].device.type == "meta"


class Recorder(dispatch_mode()):
    """Writes every operation that makes or changes a storage on `tape`."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        taped_args, taped_kwargs = map_leaves(self._taped, (args, kwargs))
        before = {ref.storage for ref in leaves((taped_args, taped_kwargs), _is_ref) if _is_ref(ref)}
        result = args[0] if _draws_nothing(func, args) else func(*args, **kwargs)
        outputs = tuple(self.tape.made(value) for value in leaves(result) if isinstance(value, Tensor))
        made = tuple(ref for ref in outputs if ref.storage not in before)
        written = self._written(func, taped_args, taped_kwargs)
        if made or written:
            self.tape.add(Entry(func, taped_args, taped_kwargs, made, written))
        return result

    def _taped(self, value: Any) -> Any:
        return self.tape.ref(value) if isinstance(value, Tensor) else value

    @staticmethod
    def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Ref, ...]:
        found: list[Ref] = []
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                found += [ref for ref in leaves(value, _is_ref) if _is_ref(ref)]
        return tuple(found)


class AsIfReal(TorchFunctionMode):
    """Lets a constructor on meta take the path that it takes for real.

    Under a meta default device `torch.tensor([...])` loses its numbers: it is made on CPU first, so that the tape has
    them. Several initialisers return at once, in silence, if `tensor.is_meta`: it answers False.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is None and not isinstance(args[0], Tensor):
            return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        if func == _IS_META:  # a new wrapper each time: equal, not identical
            return False
        return func(*args, **kwargs)


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


def truncated_normal(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> Tensor:
    """N(mean, std²) cut to [a, b], in place, by inverse CDF: torch's own rejects, so that no element has an index."""
    low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
    inner = 1 - torch.finfo(tensor.dtype).eps / 2  # rounding must not reach ±1, whose inverse is infinite
    with torch.no_grad():
        tensor.uniform_(low, high, generator=generator).clamp_(-inner, inner).erfinv_()
        return tensor.mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)
