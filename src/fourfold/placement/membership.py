"""Which weights travel together: a model's parameters, sorted into units in execution order."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as Set
from dataclasses import dataclass, field
from math import prod

from torch import Tensor, nn

from fourfold.anatomy import Anatomy
from fourfold.placement.layout import FROZEN
from fourfold.placement.unit import Owner

Group = Callable[[str, Tensor], str]
"""`group(name, parameter)`: the optimizer group of a trained parameter."""


@dataclass
class Members:
    """The weights of one unit to be.

    Attributes:
        name: of its block or blocks.
        blocks: module paths of its blocks.
        outer: some of its weights lie before or after the blocks, or rest whole.
        still: its weights are not cut by rows: they neither travel over z nor are they summed there.
        weights: (logical name, shape, optimizer group).
        owners: where each parameter hangs.
    """

    name: str
    blocks: tuple[str, ...]
    outer: bool = False
    still: bool = False
    weights: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)
    owners: dict[str, tuple[Owner, ...]] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Logical elements."""
        return sum(prod(shape) for _, shape, _ in self.weights)


def members(
    model: nn.Module,
    anatomy: Anatomy,
    group: Group,
    *,
    bucket: int,
    apart: bool,
    itemsize: int,
    still: Set[str] = frozenset(),
    held: Set[str] | None = None,
) -> list[Members]:
    """Sort every parameter into exactly one unit.

    A parameter tied across blocks, or between a block and the outside, belongs to what lies before the blocks: it is
    then whole for as long as anything may use it. So does, where blocks stay apart, a block's parameter that something
    outside of the block reads.

    Args:
        model: on any device.
        anatomy: of the model.
        group: sorts trained parameters for the optimizer.
        bucket: neighbours are merged until a unit has at least this many bytes.
        apart: what lies outside the blocks stays apart from them (their weights have other lifetimes).
        itemsize: bytes of an element on the wire.
        still: weights that are not cut by rows; they get units of their own, in the blocks' order.
        held: the weights to sort, of one pipeline stage; None: all.
    """
    owners = _owners(model)
    before, after = Members("before the blocks", (), outer=True), Members("after the blocks", (), outer=True)
    blocks = {path: Members(path, (path,)) for path in anatomy.blocks}
    resting = {path: Members(f"{path}, still", (), outer=True, still=True) for path in (None, *anatomy.blocks)}
    late, shared = set(anatomy.after), set(anatomy.read_outside) if apart else set()
    for name, parameter in model.named_parameters():
        if held is not None and name not in held:
            continue
        home = before
        homes = {_block_of(alias, anatomy.blocks) for alias in _aliases(model, owners[name])}
        if name in still:
            home = resting[homes.pop() if len(homes) == 1 else None]
        elif len(homes) == 1 and name not in shared:
            path = homes.pop()
            home = blocks[path] if path is not None else (after if name in late else before)
        kind = group(name, parameter) if parameter.requires_grad else FROZEN
        home.weights.append((name, tuple(parameter.shape), kind))
        home.owners[name] = owners[name]
    inner = list(blocks.values())
    if apart:
        units = [before, *_merge(inner, bucket, itemsize), after]
    else:
        units = _merge([before, *inner, after], bucket, itemsize)
    units = [*(rest for rest in resting.values() if rest.weights), *units]
    return [unit for unit in units if unit.weights]


def _owners(model: nn.Module) -> dict[str, tuple[Owner, ...]]:
    names: dict[int, str] = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    found: dict[str, tuple[Owner, ...]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = names[id(parameter)]
            found[name] = (*found.get(name, ()), Owner(module, attribute))
    return found


def _aliases(model: nn.Module, owners: tuple[Owner, ...]) -> list[str]:
    paths = {id(module): path for path, module in model.named_modules()}
    return [f"{paths[id(owner.module)]}.{owner.attribute}".lstrip(".") for owner in owners]


def _block_of(name: str, blocks: tuple[str, ...]) -> str | None:
    return next((path for path in blocks if name.startswith(path + ".")), None)


def _merge(blocks: list[Members], bucket: int, itemsize: int) -> list[Members]:
    merged: list[Members] = []
    for block in blocks:
        if merged and merged[-1].numel * itemsize < bucket:
            last = merged[-1]
            merged[-1] = Members(
                f"{last.name} + {block.name}",
                last.blocks + block.blocks,
                last.outer or block.outer,
                weights=last.weights + block.weights,
                owners={**last.owners, **block.owners},
            )
        else:
            merged.append(block)
    return merged
