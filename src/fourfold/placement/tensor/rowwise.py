"""Does a module make every row of its output of the same row of its input? Tried before it is computed by rows.

The plain model runs dry on one row, and on two. What the module is given and gives must have its rows in one dim of
every tensor, one after the other. And every function that it calls is tried on random numbers (`probe.py`): what it
makes of one row must be what it makes of that row among two, for both of them. Batch statistics, sums over the batch,
attention between rows, a place counted from the first row: all of these fail. So does a function that gives as many
entries as its values say; and buffers that a forward changes, which would follow one rank's rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.anatomy import Anatomy
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor import rehearsal
from fourfold.placement.tensor.probe import agrees
from fourfold.placement.tensor.rehearsal import Made, Stage
from fourfold.torch_private import leaves

_REMEDY = "leave it out of plan.placement.tensor.by_rows"


class Held(NamedTuple):
    """Where a tensor has its rows: the dim, and how many of its entries belong to each, one after the other."""

    dim: int
    each: int


NO_TENSOR = Held(-1, 0)
"""Of what is a number, or None, or text."""


@dataclass(frozen=True)
class Rowwise:
    """Of everything that a module is given, and gives, in order: where its rows are; None: a tensor without any."""

    given: tuple[Held | None, ...]
    gave: tuple[Held | None, ...]


@dataclass
class _Dry:
    """What one dry run came to: the functions called, and what modules were given and gave, call after call."""

    made: list[Made] = field(default_factory=list)
    given: dict[str, list[list[Any]]] = field(default_factory=dict)
    gave: dict[str, list[list[Any]]] = field(default_factory=dict)


def find(stage: Stage, anatomy: Anatomy, paths: Iterable[str]) -> dict[str, Rowwise]:
    """Where the rows are in what these modules are given and give; "" is the model.

    Raises:
        PlacementError: one of them does not compute row by row; names the function.
    """
    paths = tuple(paths)
    _refuse_masks(anatomy, paths)
    one, two = (_run(stage, anatomy, paths, rows) for rows in (1, 2))
    tried: set[str] = set()
    found = {"": Rowwise(_held("the model", "is given", one.given[""], two.given[""]), ())}
    if all(held in (None, NO_TENSOR) for held in found[""].given):
        raise PlacementError(f"the model: expected a tensor with the rows of the batch; {_REMEDY}")
    for path in paths:
        given = _held(path, "is given", one.given.get(path, []), two.given.get(path, []))
        gave = _held(path, "gives", one.gave.get(path, []), two.gave.get(path, []))
        if None in gave:
            raise PlacementError(
                f"{path}: gives a tensor without rows, {two.gave[path][0][gave.index(None)]}, of which each rank would "
                f"have a part; {_REMEDY}"
            )
        _try_functions(path, one, two, tried)
        found[path] = Rowwise(given, gave)
    return found


def _refuse_masks(anatomy: Anatomy, paths: Sequence[str]) -> None:
    for dropout in anatomy.dropouts:
        layout = anatomy.layouts.get(dropout.site)
        if (
            layout is not None
            and layout.order in ("apart", "fastest")
            and any(within(dropout.module, p) for p in paths)
        ):
            raise PlacementError(
                f"{dropout.module}: drops out from a tensor in which the rows do not lie one after the other, so that "
                f"a part of the rows has no mask of its own; put the batch first, set it to 0, or {_REMEDY}"
            )


def within(module: str, path: str) -> bool:
    """Whether the path of a module (or of a buffer) is this one, or lies in it."""
    return module == path or module.startswith(f"{path}.")


# ---- dry runs


def _run(stage: Stage, anatomy: Anatomy, paths: Sequence[str], rows: int) -> _Dry:
    """The plain model on copies of the example's first row."""
    batch = {name: torch.cat([tensor[:1]] * rows) for name, tensor in stage.batch.items()}
    stage = dataclasses.replace(stage, batch=batch)
    found = _Dry()
    with ExitStack() as stack:
        stack.enter_context(stage.entered())
        model = stage.twin({})
        for path in ("", *paths):
            module = model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(partial(_note, found.given, path), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(_note_result, found.gave, path)).remove)
        before = _buffers(model, paths)
        with _Uses(model, paths):
            run = rehearsal.run(model, stage.loss, stage.inputs(), anatomy, frozenset())
        if run.error is not None:
            raise run.error
        changed = [name for name, state in _buffers(model, paths).items() if state != before.get(name)]
        if changed:
            raise PlacementError(
                f"{changed[0]}: is changed by a forward, and would be what one rank's rows make of it; {_REMEDY}"
            )
    found.made = run.made
    return found


def _note(into: dict[str, list[list[Any]]], path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    into.setdefault(path, []).append([_described(leaf) for leaf in leaves((args, kwargs))])


def _note_result(into: dict[str, list[list[Any]]], path: str, module: nn.Module, args: Any, result: Any) -> None:
    into.setdefault(path, []).append([_described(leaf) for leaf in leaves(result)])


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return list(leaf.shape)
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__


def _buffers(model: nn.Module, paths: Sequence[str]) -> dict[str, tuple[int, int]]:
    """By name: which tensor it is, and how often that has been written to."""
    return {
        name: (id(buffer), buffer._version)
        for name, buffer in model.named_buffers()
        if any(within(name, p) for p in paths)
    }


class _Uses(TorchFunctionMode):
    """Refuses weights of these modules that others compute with too: one gradient would be of some rows, one of all."""

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        super().__init__()
        self.inside = 0
        self.names: dict[int, str] = {}
        for path in paths:
            module = model.get_submodule(path)
            self.names |= {id(weight): f"{path}.{name}" for name, weight in module.named_parameters()}
            module.register_forward_pre_hook(lambda *_: self._move(1))
            module.register_forward_hook(lambda *_: self._move(-1))

    def _move(self, by: int) -> None:
        self.inside += by

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.inside and any(isinstance(leaf, Tensor) for leaf in leaves(result)):
            for leaf in leaves((args, kwargs or {})):
                if id(leaf) in self.names:
                    raise PlacementError(
                        f"{self.names[id(leaf)]}: is used outside of its module too ({func.__name__}), where all "
                        f"ranks have all rows; untie it, or {_REMEDY}"
                    )
        return result


# ---- what they say


def _held(path: str, verb: str, one: list[list[Any]], two: list[list[Any]]) -> tuple[Held | None, ...]:
    """Of every call, which must be alike."""
    if not one or len(one) != len(two):
        raise PlacementError(f"{path}: is called {len(one)} times for a row and {len(two)} times for two; {_REMEDY}")
    calls = [tuple(_pairs(path, verb, small, large)) for small, large in zip(one, two, strict=True)]
    if any(call != calls[0] for call in calls):
        raise PlacementError(f"{path}: {verb} tensors with rows in other places from call to call; {_REMEDY}")
    return calls[0]


def _pairs(path: str, verb: str, one: list[Any], two: list[Any]) -> Iterator[Held | None]:
    if len(one) != len(two):
        raise PlacementError(f"{path}: {verb} other things for one row than for two; {_REMEDY}")
    for small, large in zip(one, two, strict=True):
        if not isinstance(small, list) or not isinstance(large, list):
            if small != large:
                raise PlacementError(f"{path}: {verb} {small} for one row and {large} for two; {_REMEDY}")
            yield NO_TENSOR
            continue
        dims = [dim for dim, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
        if len(small) != len(large) or len(dims) > 1 or (dims and large[dims[0]] != 2 * small[dims[0]]):
            raise PlacementError(
                f"{path}: {verb} a tensor of {small} for one row and of {large} for two: expected one dim that holds "
                f"the rows; {_REMEDY}"
            )
        yield Held(dims[0], small[dims[0]]) if dims else None


def _try_functions(path: str, one: _Dry, two: _Dry, tried: set[str]) -> None:
    ours, theirs = ([made for made in run.made if within(made.module, path)] for run in (two, one))
    if [made.function for made in ours] != [made.function for made in theirs]:
        raise PlacementError(f"{path}: calls other functions for one row than for two; {_REMEDY}")
    for whole, local in zip(ours, theirs, strict=True):
        signature = repr((whole.function, whole.call.args, whole.call.kwargs, local.call.args, local.call.kwargs))
        if signature in tried:
            continue
        tried.add(signature)
        sizes = _doubled(whole, local)
        for row in (0, 1):
            here: Mapping[tuple[int, int], list[list[int]]] = {
                (2 * size, size): [list(range(row * size, (row + 1) * size))] for size in sizes
            }
            if not agrees(whole.call, local.call, here):
                raise PlacementError(
                    f"{whole.module}: {whole.function} does not make of one row of a batch what it makes of that row "
                    f"among others: it mixes rows, counts them, or gives as many entries as its values say; {_REMEDY}"
                )


def _doubled(whole: Made, local: Made) -> set[int]:
    """Extents on one row of the dims that have twice as many on two."""
    pairs = [*zip(whole.shapes, local.shapes, strict=False)]
    pairs += [(like.shape, other.shape) for like, other in zip(whole.call.tensors, local.call.tensors, strict=False)]
    return {b for large, small in pairs for a, b in zip(large, small, strict=False) if a == 2 * b}
