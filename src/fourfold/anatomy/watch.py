"""What a forward does below autograd with random numbers and with the order of elements."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.anatomy.rehearsal import Move, Rehearsal
from fourfold.torch_private import dispatch_mode, leaves, storage_key

aten = torch.ops.aten
RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
}
"""They keep the elements in their logical order."""

MOVES = RESHAPES | {aten.cat.default, aten.repeat.default}
"""They may put rows in another order, or what was in several dims in one."""


class RandomCall(NamedTuple):
    """A call in training that draws from torch's own generators: in which module ("": in none), which function."""

    module: str
    function: str


class Watch(dispatch_mode()):
    """Sees every operator of a forward: keeps the random ones, and tells the rehearsal of those that move rows."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        """Nothing is seen yet; `rehearsal` is of the same forward."""
        super().__init__()
        self.calls, self.rehearsal = rehearsal.calls, rehearsal
        self._moved: Counter[str] = Counter()
        self._random: list[tuple[RandomCall, Any]] = []
        self._uniform: set[int] = set()
        self._idle: set[int] = set()

    @property
    def random_calls(self) -> tuple[RandomCall, ...]:
        """What drew, each once, in order."""
        mattering = (call for call, result in self._random if _storage(result) not in self._idle)
        return tuple(dict.fromkeys(mattering))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.rehearsal.rearrangements.see(func, args, kwargs, result, self.calls.inside)
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            name = getattr(self.rehearsal.running, "__name__", None) or func._schema.name.partition("::")[2]
            self._random.append((RandomCall(self.calls.inside, name), result))
            if func is aten.rand.default and result.dim() == 0:
                self._uniform.add(_storage(result))
        elif func is aten.lt.Scalar and args[1] <= 0 and _storage(args[0]) in self._uniform:
            # One uniform number held against 0 decides nothing: a stock layer drop that is off.
            self._idle.add(_storage(args[0]))
        elif func in MOVES and self.rehearsal.running is not F.linear:  # which flattens for itself, and undoes it
            module = self.calls.inside
            self.rehearsal.moves[module, self._moved[module]] = _move(func, args, kwargs, result)
            self._moved[module] += 1
        return result


def _draws(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Some operators carry the tag for a dropout that may be off, or for training alone."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        off = {"training": False, "train": False, "dropout_p": 0.0, "dropout": 0.0}.get(argument.name)
        if off is not None and value == off:
            return False
    return True


def _storage(result: Any) -> int:
    """What tells the storage of a result's first tensor from all others alive."""
    return storage_key(next(value for value in leaves(result) if isinstance(value, Tensor)))


def _move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Move:
    shape = tuple(result.shape)
    if func is aten.cat.default:
        parts, dim = args if len(args) == 2 else (args[0], kwargs.get("dim", 0))
        return Move("cat", tuple(tuple(part.shape) for part in parts), shape, dim % result.dim())
    return Move("repeat" if func is aten.repeat.default else "reshape", (tuple(args[0].shape),), shape)
