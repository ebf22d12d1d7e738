"""The blocks of a model, and a model with fewer of them: equal neighbours cost the same, so three stand for any number.

The first and the last of a run are kept beside one from the middle, since what lies before and after differs for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

KEPT = 3


@dataclass(frozen=True)
class Image:
    """A block that is traced, and the blocks of the whole model that it stands for (paths, in order)."""

    path: str
    stands_for: tuple[str, ...]


def all_of(paths: Sequence[str]) -> list[Image]:
    """Every block stands for itself."""
    return [Image(path, (path,)) for path in paths]


def shorten(model: nn.Module, paths: Sequence[str], inputs: Mapping[str, str]) -> list[Image]:
    """Remove the middle of every run of more than three equal blocks from its `ModuleList`, in place.

    Args:
        paths: of the blocks in execution order.
        inputs: what each is called with, as far as that is known; blocks on different inputs are not equal.

    Returns:
        One image for each block that is left, in the order of `paths`.
    """
    images: list[Image] = []
    for parent, group in groupby(paths, key=lambda path: path.rpartition(".")[0]):
        container = model.get_submodule(parent) if parent else model
        names = [path.rpartition(".")[2] for path in group]
        if isinstance(container, nn.ModuleList) and len(names) == len(container):
            images += _shorten_list(parent, container, inputs)
        else:
            prefix = f"{parent}." if parent else ""
            images += [Image(prefix + name, (prefix + name,)) for name in names]
    return images


def _shorten_list(parent: str, container: nn.ModuleList, inputs: Mapping[str, str]) -> list[Image]:
    keep: list[nn.Module] = []
    images: list[Image] = []

    def same(entry: tuple[int, nn.Module]) -> tuple[object, str | None]:
        return _signature(entry[1]), inputs.get(f"{parent}.{entry[0]}")

    for _, run in groupby(enumerate(container), key=same):
        members = list(run)
        short = len(members) <= KEPT
        for stood_for in [[one] for one in members] if short else [members[:1], members[1:-1], members[-1:]]:
            images.append(Image(f"{parent}.{len(keep)}", tuple(f"{parent}.{number}" for number, _ in stood_for)))
            keep.append(stood_for[0][1])
    del container[:]
    container.extend(keep)
    return images


def _signature(block: nn.Module) -> tuple[str, tuple[tuple[str, tuple[int, ...], bool], ...]]:
    """What makes two blocks equal to a tracer: their printed form (classes and settings) and their weights' shapes."""
    weights = ((name, tuple(weight.shape), weight.requires_grad) for name, weight in block.named_parameters())
    return repr(block), tuple(weights)
