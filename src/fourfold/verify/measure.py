"""How far two sets of tensors are apart, layer by layer.

The measure is max|a - b| / max|b|, both over the layer's parameters: some gradients are exactly zero (a key's bias), so
that no measure of single elements or single tensors would do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Distance:
    """The layer in which two sets of tensors differ most.

    Attributes:
        error: max|a - b| / max|b|; infinite where b is zero and a is not, or anything is not a number.
        layer: its path; empty for a loss.
    """

    error: float = 0.0
    layer: str = ""

    def __str__(self) -> str:
        return f"{self.error:.1e}" + (f" in {self.layer}" if self.layer else "")


def between(found: float, expected: float) -> Distance:
    """Two numbers."""
    return Distance(_ratio(abs(found - expected), abs(expected)))


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], blocks: Iterable[str] = ()) -> Distance:
    """Two sets of tensors by parameter name; what is missing on one side counts as infinitely far.

    Args:
        found: of the parallel run.
        expected: of the reference.
        blocks: paths whose parameters form one layer each; any other parameter's layer is its own module.
    """
    missing = sorted(found.keys() ^ expected.keys())
    if missing:
        return Distance(float("inf"), missing[0])
    return max(
        (
            Distance(
                _ratio(_peak(found[name] - expected[name] for name in names), _peak(expected[name] for name in names)),
                layer,
            )
            for layer, names in _layers(expected, blocks).items()
        ),
        key=lambda distance: distance.error,
        default=Distance(),
    )


def worst_buffer(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Distance:
    """The buffer that is furthest off, by its own name: max|a - b| / max|b|, with b all buffers of its module."""
    distances = [
        Distance(_ratio(_peak([found[name].double() - expected[name].double()]), scale), f"buffer {name}")
        for names in _layers(expected, ()).values()
        for scale in [_peak(expected[name].double() for name in names)]
        for name in names
    ]
    return max(distances, key=lambda distance: distance.error, default=Distance())


def worst_of_norms(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], scale: Mapping[str, Tensor], blocks: Iterable[str] = ()
) -> Distance:
    """||found - expected|| / ||scale|| by layer: for errors that are bounded in the norm, relative to `scale`."""
    missing = sorted(found.keys() ^ expected.keys())
    if missing:
        return Distance(float("inf"), missing[0])
    return max(
        (
            Distance(
                _ratio(_norm(found[name] - expected[name] for name in names), _norm(scale[name] for name in names)),
                layer,
            )
            for layer, names in _layers(expected, blocks).items()
        ),
        key=lambda distance: distance.error,
        default=Distance(),
    )


def _layers(tensors: Iterable[str], blocks: Iterable[str]) -> dict[str, list[str]]:
    layers: defaultdict[str, list[str]] = defaultdict(list)
    paths = tuple(blocks)
    for name in tensors:
        block = next((path for path in paths if name.startswith(path + ".")), None)
        layers[block if block is not None else name.rpartition(".")[0] or name].append(name)
    return dict(layers)


def _peak(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([tensor.abs().max() if tensor.numel() else torch.zeros(()) for tensor in tensors]).max())


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([torch.linalg.vector_norm(tensor.double()) for tensor in tensors]).norm())


def _ratio(error: float, scale: float) -> float:
    if error == 0:
        return 0.0
    return error / scale if scale > 0 and error == error and scale == scale else float("inf")
