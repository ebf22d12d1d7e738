"""Watches a step operator by operator: which storages come and go, where in the model, and what each operator costs."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fourfold import torch_private
from fourfold.anatomy.nest import tensors
from fourfold.planner.tap import Message

BEFORE, AFTER = -1, 10**9
"""Places of what lies outside every block; a block's place is its number in execution order."""

STILL = AFTER + 1
"""The place of weights, in blocks or not, that do not travel: whose they are does not matter."""

FORWARD, BACKWARD, DONE = "forward", "backward", "done"

FREE_OF_COST = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "alias",
    "_unsafe_view",
    "lift_fresh",
}
"""Operators that compute nothing."""


class Recorder(torch_private.dispatch_mode()):
    """A dispatch mode that writes a tape of plain lists (see `tape.Tape`), so that it can cross a pipe as JSON.

    `phase` and `place` are set from outside, by hooks, and say to which segment the next events belong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.place = FORWARD, BEFORE
        self.deaf = False
        self.uses = False
        """Of products in backward, also tell which storages they read: ["use", storage] before the operator."""
        self.segments: list[list[Any]] = []
        """[phase, place, events]; an event is ["+", storage], ["-", storage], ["op", operator], ["send", message] or
        ["wait", message]."""
        self.storages: list[list[Any]] = []
        """[phase, place, ordinal in that segment, bytes, "" | "mask", itemsize] of each storage in order of birth."""
        self.operators: list[dict[str, Any]] = []
        self.messages: list[Message] = []
        """What is sent to other ranks over x and y, in order."""
        self._operator_numbers: dict[str, int] = {}
        self._alive: dict[int, int] = {}
        self._born: dict[tuple[str, int], int] = {}

    # ---- storages

    def know(self, tensor: Tensor) -> None:
        """This tensor's storage was there before: it is not an event."""
        self._alive[id(tensor.untyped_storage())] = -1

    def number(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage; None where it was there before."""
        found = self._alive.get(id(tensor.untyped_storage()), -1)
        return None if found < 0 else found

    def _event(self, *event: Any) -> None:
        if self.phase == DONE:
            return
        if not self.segments or self.segments[-1][:2] != [self.phase, self.place]:
            self.segments.append([self.phase, self.place, []])
        self.segments[-1][2].append(list(event))

    def _birth(self, tensor: Tensor) -> int:
        """Note a storage unless it is known; returns the new bytes."""
        storage = tensor.untyped_storage()
        if id(storage) in self._alive or storage.nbytes() == 0:
            return 0
        number = len(self.storages)
        segment = (self.phase, self.place)
        ordinal = self._born[segment] = self._born.get(segment, -1) + 1
        self.storages.append([self.phase, self.place, ordinal, storage.nbytes(), "", tensor.itemsize])
        self._alive[id(storage)] = number
        weakref.finalize(storage, self._death, id(storage), number).atexit = False
        self._event("+", number)
        return storage.nbytes()

    def _death(self, identity: int, number: int) -> None:
        if self._alive.get(identity) == number:
            del self._alive[identity]
            self._event("-", number)

    def forget(self) -> None:
        """What was heard until now is none of the step: ranks also talk when they rehearse it."""
        self.messages.clear()
        self.segments.clear()

    # ---- messages

    def send(self, message: Message) -> int:
        """A collective is issued here."""
        self.messages.append(message)
        self._event("send", len(self.messages) - 1)
        return len(self.messages) - 1

    def amend(self, number: int, message: Message) -> None:
        """It is this one."""
        self.messages[number] = message

    def wait(self, number: int) -> None:
        """The model waits for it here."""
        self._event("wait", number)

    # ---- operators

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _talks(function, args):
            with self:  # what it computes, sends and waits for, in its order
                return torch_private.composite(function, args, kwargs)
        result = function(*args, **kwargs)
        if self.deaf:
            return result
        outputs = list(tensors(result))
        born = sum(self._birth(tensor) for tensor in outputs)
        name = function._overloadpacket.__name__
        if name in ("bernoulli_", "bernoulli"):
            self._mask(outputs[0])
        if name not in FREE_OF_COST and not function.is_view and outputs:
            operator = self._operator(function, args, kwargs, result, outputs, born)
            if self.uses and self.phase == BACKWARD and self.operators[operator]["flops"]:
                for number in {self.number(tensor): None for tensor in tensors((args, kwargs))}:
                    if number is not None:
                        self._event("use", number)
            self._event("op", operator)
        return result

    def _mask(self, tensor: Tensor) -> None:
        number = self.number(tensor)
        if number is not None:
            self.storages[number][4] = "mask"

    def _operator(self, function: Any, args: Any, kwargs: Any, result: Any, outputs: list[Tensor], born: int) -> int:
        inputs = list(tensors((args, kwargs)))
        moved = sum(tensor.numel() * tensor.itemsize for tensor in (*inputs, *outputs))
        record = {
            "name": str(function),
            "args": describe(args),
            "kwargs": describe(kwargs),
            "flops": flops(function, args, kwargs, result),
            "bytes": moved,
            "born": born,
        }
        key = json.dumps(record)
        if key not in self._operator_numbers:
            self.operators.append(record)
            self._operator_numbers[key] = len(self.operators) - 1
        return self._operator_numbers[key]


def _talks(function: Any, args: Any) -> bool:
    """An operator of ours that is given the key of an axis."""
    return function.namespace == "fourfold" and any(isinstance(value, str) and "@" in value for value in args)


def describe(value: Any) -> Any:
    """Operator arguments as JSON from which equal ones can be made (`workspace.rebuild`)."""
    if isinstance(value, Tensor):
        layout = [list(value.shape), list(value.stride())]
        return {"tensor": layout, "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"mapping": {str(key): describe(entry) for key, entry in value.items()}}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [describe(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"other": type(value).__name__}


def flops(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations of one operator call: matrix products, convolutions and attention (dense counting).

    torch's formulas, and our own for attention on CPU, which torch counts as zero (pytorch#195460).
    """
    packet = function._overloadpacket
    name = packet.__name__
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return _attention(args[0], args[1], args[2], 1.0)
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return _attention(args[1], args[2], args[3], 2.5)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _attention(query: Tensor, key: Tensor, value: Tensor, times: float) -> int:
    """Two products, each batch x heads x queries x keys x width; backward has five of them (one computed again)."""
    batch, heads, queries, width = query.shape
    return int(times * 2 * batch * heads * queries * key.shape[-2] * (width + value.shape[-1]))
