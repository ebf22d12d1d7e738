"""Plays a tape again on CPU with random numbers from logical streams: one whole tensor, or one slice of it.

A slice [start, stop) is played without making the whole when every operation that leads to the tensor is elementwise:
random fills draw just these elements of their stream, the rest is arithmetic on them. Otherwise (orthogonal weights,
tables made of ranges and products) the tensor is made whole and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fourfold.anatomy.tape import Entry, Ref, Tape
from fourfold.randomness import bits, normal, threshold, uniform
from fourfold.torch_private import leaves, map_leaves


class InitialiserError(ValueError):
    """An initial value that cannot be played again."""


_UNARY = "abs neg sign sqrt rsqrt exp log log1p expm1 erf erfinv tanh sigmoid reciprocal square"
_BINARY = "add sub mul div pow clamp clamp_min clamp_max"
ELEMENTWISE = frozenset(
    f"aten::{name}{suffix}" for name in f"{_UNARY} {_BINARY}".split() for suffix in ("", "_")
) | frozenset(("aten::_to_copy", "aten::clone", "aten::copy_", "aten::fill_", "aten::zero_", "aten::lift_fresh_copy"))
FILLS: Mapping[str, float] = {
    f"aten::{prefix}{name}{suffix}": value
    for name, value in (("empty", 0.0), ("zeros", 0.0), ("ones", 1.0))
    for prefix, suffix in (("", ""), ("", "_like"), ("new_", ""))
}
RANDOM = frozenset(
    f"aten::{name}" for name in "normal_ uniform_ bernoulli_ randn rand randn_like rand_like exponential_".split()
)
OVERWRITES = frozenset(f"aten::{name}" for name in "normal_ uniform_ bernoulli_ exponential_ zero_ fill_ copy_".split())


def history(tape: Tape, storage: int) -> list[int]:
    """Indices of the entries that decide the final value of `storage`, in order; overwritten ones are left out."""
    needed: set[int] = set()
    pending = [(storage, len(tape.entries))]
    while pending:
        number, end = pending.pop()
        for index in reversed([i for i in tape.writers.get(number, ()) if i < end]):
            entry = tape.entries[index]
            if index not in needed:
                needed.add(index)
                pending += [(ref.storage, index) for ref in entry.reads if ref.storage != number]
            if _overwrites(entry, number):
                break
    return sorted(needed)


def _overwrites(entry: Entry, storage: int) -> bool:
    if any(ref.storage == storage for ref in entry.made):
        return True
    return entry.name in OVERWRITES and any(ref.storage == storage and ref.full for ref in entry.written)


def is_random(entry: Entry) -> bool:
    """Whether the entry draws; an operation that draws in a way not known here is an error.

    Raises:
        InitialiserError: a random operation without a stream, such as `randperm`.
    """
    if entry.name in RANDOM:
        return True
    if entry.func is not None and torch.Tag.nondeterministic_seeded in entry.func.tags:
        raise InitialiserError(
            f"{entry.name} draws in an order of its own and has no logical stream; expected one of"
            f" {', '.join(sorted(RANDOM))}: initialise with these, or build the model for real and load its weights"
        )
    return False


def sliceable(entry: Entry) -> bool:
    """Whether the entry can be played for a slice of its storage alone."""
    targets = entry.made + entry.written
    if len(targets) != 1 or entry.func is None:
        return False
    target = targets[0]
    others = [ref for ref in entry.reads if ref.storage != target.storage]
    if entry.name in ELEMENTWISE:
        if not others:
            return target.run
        return target.full and all(ref.full and ref.total == target.total for ref in others)
    if entry.name in RANDOM:
        return target.run and not _tensor_arguments(entry)
    return entry.name in FILLS or entry.name in ("aten::full", "aten::full_like", "aten::new_full")


def _tensor_arguments(entry: Entry) -> bool:
    """Whether a random fill takes its distribution's parameters from a tensor (not from numbers)."""
    return any(isinstance(value, Ref) for value in entry.args[1:])


Draw = Callable[[Entry, Ref, int, int], Tensor]
"""(entry, window, first, last) → float64 values of the stream's elements [first, last)."""


def draw(entry: Entry, seed: int, site: str, first: int, last: int) -> Tensor:
    """Elements [first, last) of what a random entry draws, float64; the numbers in its arguments are its parameters."""
    numbers = [value for value in entry.args if isinstance(value, (int, float))]
    match entry.name:
        case "aten::normal_":
            mean, std = (*numbers, 0.0, 1.0)[:2] if len(numbers) != 1 else (numbers[0], 1.0)
            return normal(seed, site, first, last - first, torch.float64).mul_(std).add_(mean)
        case "aten::uniform_":
            low, high = (*numbers, 0.0, 1.0)[:2] if len(numbers) != 1 else (numbers[0], 1.0)
            return uniform(seed, site, first, last - first, torch.float64).mul_(high - low).add_(low)
        case "aten::bernoulli_":
            cut = threshold(numbers[0] if numbers else 0.5)
            return torch.from_numpy(bits(seed, site, 0, first, last - first) < cut).double()
        case "aten::exponential_":
            rate = numbers[0] if numbers else 1.0
            return uniform(seed, site, first, last - first, torch.float64).neg_().log1p_().div_(-rate)
        case "aten::randn" | "aten::randn_like":
            return normal(seed, site, first, last - first, torch.float64)
        case _:
            return uniform(seed, site, first, last - first, torch.float64)


def play_slice(tape: Tape, indices: list[int], sites: Mapping[int, str], seed: int, target: Ref, span: range) -> Tensor:
    """Elements `span` of the storage of `target`, by entries that are all `sliceable`."""
    held: dict[int, Tensor] = {}
    for index in indices:
        entry = tape.entries[index]
        (ref,) = entry.made + entry.written
        first, last = max(span.start, ref.offset), min(span.stop, ref.offset + ref.numel)
        if ref.storage not in held:
            held[ref.storage] = torch.zeros(len(span), dtype=ref.dtype)
        part = held[ref.storage][max(first - span.start, 0) : max(last - span.start, 0)]
        if entry.name in RANDOM:
            if first < last:
                part.copy_(draw(entry, seed, sites[index], first, last))
        elif entry.made and entry.name not in ELEMENTWISE:
            part.fill_(_fill(entry))
        else:
            local = {number: part if number == ref.storage else value for number, value in held.items()}
            args, kwargs = _real(entry, lambda operand, local=local: local[operand.storage])
            result = entry.func(*args, **kwargs)
            if entry.made:
                held[ref.storage] = result
    return held[target.storage]


def _fill(entry: Entry) -> Any:
    return FILLS[entry.name] if entry.name in FILLS else entry.args[-1]


def play_whole(tape: Tape, indices: list[int], sites: Mapping[int, str], seed: int, target: Ref) -> Tensor:
    """The tensor at `target`, by playing every entry for real."""
    held: dict[int, Tensor] = {}

    def window(ref: Ref) -> Tensor:
        if ref.storage not in held:
            raise InitialiserError(f"a tensor of shape {ref.size} comes from outside of the recorded operations")
        view = torch.empty(0, dtype=ref.dtype)
        return view.set_(held[ref.storage].untyped_storage(), ref.offset, ref.size, ref.stride)

    for index in indices:
        entry = tape.entries[index]
        if entry.func is None:
            held[entry.made[0].storage] = entry.args[0].clone()
        elif is_random(entry):
            ref = (entry.made + entry.written)[0]
            held.setdefault(ref.storage, torch.zeros(ref.total, dtype=ref.dtype))
            first = ref.offset if ref.run else 0
            window(ref).copy_(draw(entry, seed, sites[index], first, first + ref.numel).view(ref.size))
        else:
            _execute(entry, window, held)
    return window(target)


def _execute(entry: Entry, window: Callable[[Ref], Tensor], held: dict[int, Tensor]) -> None:
    for ref in entry.written:
        if ref.storage not in held:  # all that came before is overwritten here
            held[ref.storage] = torch.zeros(ref.total, dtype=ref.dtype)
    args, kwargs = _real(entry, window)
    result = entry.func(*args, **kwargs)
    fresh = [value for value in leaves(result) if isinstance(value, Tensor)]
    if entry.name.removeprefix("aten::").removeprefix("new_").startswith("empty"):
        for value in fresh:
            value.zero_()  # what nobody initialises is zero, everywhere
    for ref, value in zip(entry.made, fresh[-len(entry.made) :] if entry.made else (), strict=True):
        storage = torch.zeros(ref.total, dtype=ref.dtype)
        storage.as_strided(ref.size, ref.stride, ref.offset).copy_(value)
        held[ref.storage] = storage


def _real(entry: Entry, window: Callable[[Ref], Tensor]) -> tuple[tuple, dict[str, Any]]:
    def real(value: Any) -> Any:
        if isinstance(value, Ref):
            return window(value)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    return map_leaves(real, (entry.args, entry.kwargs), lambda value: isinstance(value, Ref))
