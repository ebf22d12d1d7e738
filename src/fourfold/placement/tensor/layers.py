"""Modules that are more than the one linear that would take their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from fourfold.anatomy import Anatomy, own_names
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.rehearsal import Run

PRODUCTS = frozenset("linear addmm matmul mm __matmul__ __rmatmul__ conv1d conv2d conv3d".split())
FREE = frozenset("t transpose size view reshape contiguous flatten to type_as pad".split())
"""What a layer may do beside its product: F.pad is part of a convolution that pads by reflection."""


def refuse_holders(model: nn.Module, anatomy: Anatomy) -> None:
    """A linear on blocks reads `weight` and `bias` of its module, so the module must hold these and nothing else.

    Raises:
        PlacementError: names the weight, the module and what it holds.
    """
    names = own_names(model)
    held = Counter(linear.module for linear in anatomy.linears.values())
    for name, path, module in _layers(model, anatomy):
        others = [key for key, _ in module.named_parameters(recurse=False) if key not in ("weight", "bias")]
        if held[path] > 1 or names.get(id(getattr(module, "weight", None))) != name or others:
            raise PlacementError(
                f"{name}: is read by {_described(path, module)}, which holds "
                f"{', '.join(key for key, _ in module.named_parameters())}; {_EXPECTED}"
            )


def refuse_layers(model: nn.Module, anatomy: Anatomy, whole: Run) -> None:
    """A linear on blocks takes the place of its module's whole forward, so that must be a linear and nothing else.

    Raises:
        PlacementError: names the weight, the module and what else it does.
    """
    for name, path, module in _layers(model, anatomy):
        done = whole.inside.get(path, [])
        products = [function for function in done if function in PRODUCTS]
        extra = sorted({function for function in done if function not in PRODUCTS | FREE})
        if len(products) != whole.times[path] or extra:
            raise PlacementError(
                f"{name}: {_described(path, module)} calls {', '.join(extra or products or ['no product'])} "
                f"around its weight; {_EXPECTED}"
            )


def _layers(model: nn.Module, anatomy: Anatomy) -> Iterator[tuple[str, str, nn.Module]]:
    """(weight, path of its module, the module) of linears, but for experts with all weights in one (`experts.py`)."""
    for name, linear in anatomy.linears.items():
        if linear.layout in ("out,in", "in,out"):
            yield name, linear.module, model.get_submodule(linear.module)


_EXPECTED = (
    "expected a module that is one linear layer, with `weight` and `bias` alone (nn.Linear, a convolution), in whose "
    "place blocks are multiplied. Write it as several, or leave out plan.placement.tensor"
)


def _described(path: str, module: nn.Module) -> str:
    return f"{path or 'the model'} ({type(module).__name__})"
